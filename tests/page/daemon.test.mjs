// The page of a real daemon on this host: what it shows is what /metrics says.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { test } from "node:test";
import puppeteer from "puppeteer-core";
import { agree, range } from "./agree.mjs";

const CHROMIUM = process.env.CHROMIUM ?? "/usr/bin/chromium";

/** Starts the daemon on a free port; it writes nothing to the kernel. */
async function start(t) {
  const program = process.env.NUMAWARD;
  assert.ok(program, "NUMAWARD names the daemon's program; `cargo xtask test page` builds it");
  const directory = await mkdtemp(join(tmpdir(), "numaward-page-"));
  const daemon = spawn(program, ["run", "--listen", "127.0.0.1:0", "--log-format", "json"], {
    env: {
      ...process.env,
      NUMAWARD_STATE_DIRECTORY: join(directory, "state"),
      NUMAWARD_CONTROL_SOCKET: join(directory, "control.sock"),
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
  const said = [];
  for await (const line of createInterface(daemon.stderr)) {
    said.push(line);
    const event = JSON.parse(line);
    if (event.message !== "serving") continue;
    daemon.stderr.resume();
    return `http://${event.address}/`;
  }
  throw new Error(`the daemon does not serve:\n${said.join("\n")}`);
}

test("what is shown stands for what is meant", () => {
  assert.deepEqual(range("12 B"), { least: 12, most: 12 });
  assert.deepEqual(range("1.50 KiB"), { least: 1536 - 5.12, most: 1536 + 5.12 });
  assert.equal(range("–"), null);
});

test("the page and /metrics say the same", async (t) => {
  const url = await start(t);
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
