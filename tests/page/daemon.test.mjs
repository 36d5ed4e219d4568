// The page of a real daemon on this host: what it shows is what /metrics says. And pages of others, which change nothing and
// read nothing.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { mkdtemp, rm, writeFile } from "node:fs/promises";
import { createServer } from "node:http";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { test } from "node:test";
import puppeteer from "puppeteer-core";
import { agree, range } from "./agree.mjs";

const CHROMIUM = process.env.CHROMIUM ?? "/usr/bin/chromium";

const TOKEN = "correct-horse-battery-staple";

/** Starts the daemon on free ports; it writes nothing to the kernel. Gives its addresses, and each line that it logs. */
async function start(t) {
  const program = process.env.NUMAWARD;
  assert.ok(program, "NUMAWARD names the daemon's program; `cargo xtask test page` builds it");
  const directory = await mkdtemp(join(tmpdir(), "numaward-page-"));
  const token = join(directory, "token");
  await writeFile(token, TOKEN, { mode: 0o600 });
  const daemon = spawn(program, ["run", "--listen", "127.0.0.1:0", "--log-format", "json", "--log-level", "debug"], {
    env: {
      ...process.env,
      NUMAWARD_STATE_DIRECTORY: join(directory, "state"),
      NUMAWARD_CONTROL_SOCKET: join(directory, "control.sock"),
      NUMAWARD_CONTROL_LISTEN: "127.0.0.1:0",
      NUMAWARD_CONTROL_TOKEN_FILE: token,
      NUMAWARD_ENFORCEMENT_MODE: "dry-run",
    },
    stdio: ["ignore", "ignore", "pipe"],
  });
  t.after(async () => {
    const ended = new Promise((resolve) => daemon.on("exit", resolve));
    if (daemon.exitCode === null) {
      daemon.kill();
      await ended;
    }
    await rm(directory, { recursive: true });
  });
  const [said, found] = [[], {}];
  const lines = createInterface(daemon.stderr);
  return new Promise((resolve, reject) => {
    lines.on("line", (line) => {
      const event = JSON.parse(line);
      said.push(event);
      if (event.message === "serving") found.url = `http://${event.address}/`;
      if (event.message === "guarantees can be asked for over TCP") found.control = `http://${event.address}/`;
      if (found.url && found.control) resolve({ ...found, said });
    });
    lines.on("close", () => reject(new Error(`the daemon does not serve:\n${said.map(JSON.stringify).join("\n")}`)));
  });
}

test("what is shown stands for what is meant", () => {
  assert.deepEqual(range("12 B"), { least: 12, most: 12 });
  assert.deepEqual(range("1.50 KiB"), { least: 1536 - 5.12, most: 1536 + 5.12 });
  assert.equal(range("–"), null);
});

test("the page and /metrics say the same", async (t) => {
  const { url } = await start(t);
  const browser = await puppeteer.launch({ executablePath: CHROMIUM, args: ["--no-sandbox", "--disable-dev-shm-usage"] });
  t.after(() => browser.close());
  const page = await browser.newPage();
  await page.setViewport({ width: 1400, height: 1000 });
  const said = [];
  page.on("console", (message) => said.push(`${message.type()}: ${message.text()}`));
  page.on("pageerror", (error) => said.push(String(error)));
  await page.goto(url);
  await page.waitForSelector("#rows tr[data-key]", { timeout: 60_000 });
  const { count, workloads } = await agree(page, url);
  assert.ok(count >= 2 + 3, `${count} figures`);
  t.diagnostic(`${count} figures of nodes and of ${workloads.join(", ")}`);
  assert.deepEqual(said.filter((line) => !line.includes("503")), []);
});

/** The page of somebody else, on a port of this host. */
async function stranger(t) {
  const server = createServer((_, response) => response.writeHead(200, { "content-type": "text/html" }).end("<!doctype html><title>evil</title>"));
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  t.after(() => server.close());
  return server.address().port;
}

const ALLOCATIONS = "api/v1/allocations";
const BODY = JSON.stringify({ name: "evil", target: { cgroup: "/" }, cpus: 1 });
const HOST = "evil.example";

/** A browser for which the stranger's name leads to this host. */
async function browse(t) {
  const args = ["--no-sandbox", "--disable-dev-shm-usage", `--host-resolver-rules=MAP ${HOST} 127.0.0.1`];
  const browser = await puppeteer.launch({ executablePath: CHROMIUM, args });
  t.after(() => browser.close());
  return browser.newPage();
}

/** What the daemon has answered since the last time: "METHOD path status" of each request, once. */
async function answered(daemon, ask) {
  const before = daemon.said.length;
  await ask();
  // What was answered is logged a little later.
  await new Promise((resolve) => setTimeout(resolve, 500));
  const requests = daemon.said.slice(before).filter(({ message }) => message === "request");
  return [...new Set(requests.map(({ method, uri, status }) => `${method} ${uri} ${status}`))].sort();
}

const allocations = async ({ url }) => (await (await fetch(url + ALLOCATIONS)).json()).allocations;

test("a page of another origin changes nothing", async (t) => {
  const daemon = await start(t);
  const port = await stranger(t);
  const page = await browse(t);
  const before = await allocations(daemon);
  // Who has the token and is no page gets as far as to be judged.
  const headers = { authorization: `Bearer ${TOKEN}`, "content-type": "application/json" };
  const own = await fetch(daemon.control + ALLOCATIONS, { method: "POST", headers, body: BODY });
  assert.equal(own.status, 422, await own.text());
  for (const [address, preflight] of [[daemon.control, 401], [daemon.url, 405]]) {
    await page.goto(`http://${HOST}:${port}/`);
    // Without asking whether it may, and so that it cannot read the answer.
    const simple = await answered(daemon, () =>
      page.evaluate(async (to, body) => {
        await fetch(to, { method: "POST", mode: "no-cors", body });
        await fetch(to, { method: "POST", mode: "no-cors", body: new Blob([body], { type: "text/plain" }) });
      }, address + ALLOCATIONS, BODY));
    assert.deepEqual(simple, [`POST /${ALLOCATIONS} 403`]);
    // It asks whether it may, and may not.
    const asked = await answered(daemon, async () => {
      const failed = await page.evaluate(async (to, body) => {
        const headers = { "content-type": "application/json", authorization: "Bearer guessed" };
        const tried = [
          fetch(to, { method: "POST", headers, body }),
          fetch(`${to}/evil`, { method: "DELETE" }),
          fetch(to, { method: "POST", headers, body, credentials: "include" }),
        ];
        return (await Promise.allSettled(tried)).map(({ status }) => status);
      }, address + ALLOCATIONS, BODY);
      assert.deepEqual(failed, ["rejected", "rejected", "rejected"]);
    });
    assert.ok(asked.every((line) => line.startsWith("OPTIONS ") && line.endsWith(` ${preflight}`)), asked.join("\n"));
    // A form, which may be sent anywhere.
    for (const type of ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data"]) {
      await page.goto(`http://${HOST}:${port}/`);
      const sent = await answered(daemon, () => {
        const shown = page.waitForNavigation();
        return Promise.all([shown, page.evaluate((action, enctype, body) => {
          const form = Object.assign(document.createElement("form"), { action, enctype, method: "post" });
          form.append(Object.assign(document.createElement("input"), { name: body, value: "" }));
          document.body.append(form);
          form.submit();
        }, address + ALLOCATIONS, type, BODY)]);
      });
      assert.ok(sent.includes(`POST /${ALLOCATIONS} 403`), `${type}: ${sent.join("\n")}`);
    }
  }
  const changes = daemon.said.filter(({ message, method, status }) => message === "request" && method !== "GET" && status < 300);
  assert.deepEqual([changes, await allocations(daemon)], [[], before]);
});

test("a page whose name was made to lead here reads and changes nothing", async (t) => {
  const daemon = await start(t);
  const page = await browse(t);
  // The first document is the stranger's; then its name leads here.
  await page.setRequestInterception(true);
  page.on("request", (request) =>
    new URL(request.url()).pathname === "/evil" ? request.respond({ contentType: "text/html", body: "<!doctype html>" }) : request.continue());
  for (const [address, status] of [[daemon.url, 421], [daemon.control, 401]]) {
    const { port } = new URL(address);
    await page.goto(`http://${HOST}:${port}/evil`);
    const seen = await page.evaluate(async (path, body) => {
      const headers = { "content-type": "application/json" };
      const asked = [
        fetch(path), fetch("/metrics"), fetch("/"),
        fetch(path, { method: "POST", headers, body }),
        fetch(`${path}/evil`, { method: "DELETE" }),
      ];
      return Promise.all((await Promise.all(asked)).map(async (answer) => [answer.status, await answer.text()]));
    }, `/${ALLOCATIONS}`, BODY);
    assert.deepEqual(seen.map(([status]) => status), Array(5).fill(status), JSON.stringify(seen));
    assert.ok(seen.every(([, text]) => !text.includes("numaward_") && !text.includes("sharedCpus")), JSON.stringify(seen));
  }
  assert.deepEqual(await allocations(daemon), []);
});
