// What a page of somebody else can do with a daemon that the browser reaches: read nothing and change nothing. Each of its
// requests is also made by those who may, and then does what it says. Against most of them the daemon has two checks, of which
// one is enough; each alone is tested in `userspace/daemon/tests/control.rs`.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { createServer, request } from "node:http";
import puppeteer from "puppeteer-core";
import { CHROMIUM, controlled, start } from "./daemon.mjs";

/** All lead to this host. The daemon knows one of them, by its configuration. */
const NAMES = ["evil.example", "numaward.example"];
const [EVIL, KNOWN] = NAMES;
/** A change that can be carried out, as a script and as a form send it: the latter puts a `=` between name and value. */
const CHANGE = JSON.stringify({ name: "taken", target: { cgroup: "/free" }, cpus: 1, memory: "64Mi", placement: { apart: ["app=batch"] } });
const [FIELD, VALUE] = CHANGE.split("=");

let browser;
before(async () => {
  browser = await puppeteer.launch({
    executablePath: CHROMIUM,
    args: [
      "--no-sandbox",
      "--disable-dev-shm-usage",
      `--host-resolver-rules=${NAMES.map((name) => `MAP ${name} 127.0.0.1`).join(",")}`,
      // What browsers do by themselves against such pages is not tested, nor are all of them so careful.
      "--disable-features=LocalNetworkAccessChecks,HttpsUpgrades",
    ],
  });
});
after(() => browser.close());

/** Asks directly, as somebody who has the token. */
function ask(url, method = "GET", { token, body = "", type = "application/json" } = {}) {
  const headers = { ...(token && { authorization: `Bearer ${token}` }), ...(body && { "content-type": type }) };
  return fetch(url, { method, headers, ...(body && { body }) });
}

/** Who has a guarantee on how many CPUs. */
async function held({ reading }) {
  const { allocations } = await (await ask(`${reading}api/v1/allocations`)).json();
  return allocations.map(({ name, cpus }) => `${name} ${cpus}`);
}

/**
 * Somebody's server. `/attack` is its page. The rest goes to `target`, if there is one, as it came but for the headers that
 * are added: that is what a name leads to once its owner has pointed it elsewhere, and what a browser does that
 * has credentials.
 */
async function server(t, target, headers = {}) {
  const asked = [];
  const serve = (request_, response) => {
    if (!target || request_.url === "/attack") {
      response.writeHead(200, { "content-type": "text/html" });
      return response.end("<!doctype html><title>attack</title><body></body>");
    }
    const parts = [];
    request_.on("data", (part) => parts.push(part));
    request_.on("end", () => {
      const body = Buffer.concat(parts);
      const { origin, host } = request_.headers;
      const entry = { method: request_.method, path: request_.url, type: request_.headers["content-type"], origin, host, body: String(body) };
      asked.push(entry);
      const passed = request(new URL(request_.url, target), { method: request_.method, headers: { ...request_.headers, ...headers } }, (answer) => {
        entry.status = answer.statusCode;
        entry.allowed = answer.headers["access-control-allow-origin"];
        response.writeHead(answer.statusCode, answer.headers);
        answer.pipe(response);
      });
      response.on("close", () => passed.destroy());
      passed.on("error", () => response.destroy());
      passed.end(body);
    });
  };
  const listening = createServer(serve);
  await new Promise((resolve) => listening.listen(0, "127.0.0.1", resolve));
  t.after(() => {
    listening.closeAllConnections();
    return new Promise((resolve) => listening.close(resolve));
  });
  return { port: listening.address().port, url: `http://127.0.0.1:${listening.address().port}/`, asked };
}

/** A page at an address; closed with the test. */
async function open(t, url) {
  const page = await browser.newPage();
  t.after(() => page.close());
  page.on("dialog", (dialog) => dialog.dismiss());
  await page.goto(url);
  return page;
}

/** In the page: sends what a page can send to change something at `url`, and waits until each was answered or given up. */
async function attack(url, change, field, value) {
  const allocations = `${url}api/v1/allocations`;
  const form = (enctype, names, to = allocations) => new Promise((resolve) => {
    const frame = document.createElement("iframe");
    frame.name = `frame${document.querySelectorAll("iframe").length}`;
    document.body.append(frame);
    const made = document.createElement("form");
    Object.assign(made, { method: "post", action: to, enctype, target: frame.name });
    for (const [name, value] of names) {
      const input = document.createElement("input");
      Object.assign(input, { type: "hidden", name, value });
      made.append(input);
    }
    document.body.append(made);
    frame.addEventListener("load", resolve);
    made.submit();
  });
  const json = { "content-type": "application/json" };
  const send = (to, options) => fetch(to, { credentials: "include", ...options }).then(() => {}, () => {});
  await form("text/plain", [[field, value]]);
  await form("application/x-www-form-urlencoded", [["name", "a"], ["cpus", "1"]]);
  await form("multipart/form-data", [["name", "a"], ["cpus", "1"]]);
  await form("text/plain", [], `${url}api/v1/rebalance`);
  await send(allocations, { method: "POST", mode: "no-cors", body: change });
  await send(allocations, { method: "POST", mode: "no-cors", body: change, headers: json });
  await send(allocations, { method: "POST", mode: "no-cors", body: new Blob([change], { type: "text/plain" }) });
  await send(allocations, { method: "POST", body: change });
  await send(allocations, { method: "POST", body: change, headers: json });
  await send(allocations, { method: "PUT", body: change, headers: json });
  await send(`${allocations}/held`, { method: "PATCH", body: '{"cpus": 2}', headers: json });
  await send(`${allocations}/held`, { method: "DELETE" });
  await send(`${allocations}/held`, { method: "DELETE", mode: "no-cors" });
  await send(`${allocations}/held`, { method: "POST", mode: "no-cors", body: "_method=DELETE", headers: { "x-http-method-override": "DELETE" } });
  navigator.sendBeacon(allocations, change);
  // Of no origin at all.
  await new Promise((resolve) => {
    const frame = document.createElement("iframe");
    frame.sandbox = "allow-scripts";
    addEventListener("message", resolve, { once: true });
    frame.srcdoc = `<script>fetch(${JSON.stringify(allocations)}, { method: "POST", mode: "no-cors", body: ${JSON.stringify(change)} })
      .catch(() => {}).finally(() => parent.postMessage("done", "*"))</script>`;
    document.body.append(frame);
  });
}

test("a page of others changes nothing", async (t) => {
  const daemon = await controlled(t);
  const { token } = daemon;
  const evil = await server(t);
  const doors = {
    "with credentials": await server(t, daemon.changing, { authorization: `Bearer ${token}` }),
    "without": await server(t, daemon.changing),
    "for reading": await server(t, daemon.reading),
  };
  const before = await held(daemon);
  assert.deepEqual(before, ["held 1"]);
  // Of another site, and of another port of the same one: somebody else's server on this host.
  for (const origin of [`http://${EVIL}:${evil.port}`, `http://127.0.0.1:${evil.port}`, `http://localhost:${evil.port}`]) {
    for (const [name, door] of Object.entries(doors)) {
      const page = await open(t, `${origin}/attack`);
      await page.evaluate(attack, door.url, CHANGE, FIELD, VALUE);
      assert.deepEqual(await held(daemon), before, `${origin}, ${name}`);
    }
  }
  for (const [name, { asked }] of Object.entries(doors)) {
    // Browsers ask first for what a form cannot send; what a form can, they send.
    const preflights = asked.filter(({ method }) => method === "OPTIONS");
    const posts = asked.filter(({ method }) => method === "POST");
    assert.ok(preflights.length >= 3 * 4 && posts.length >= 3 * 9, `${name}: ${JSON.stringify(asked)}`);
    assert.deepEqual(asked.filter(({ method }) => !["OPTIONS", "POST"].includes(method)), [], name);
    assert.deepEqual(asked.filter(({ status, allowed }) => status < 400 || allowed !== undefined), [], name);
    const origins = new Set(posts.map(({ origin }) => origin));
    assert.ok(origins.has("null") && origins.has(`http://${EVIL}:${evil.port}`), name);
  }
  // The very same, from somebody who may.
  const allocations = `${daemon.changing}api/v1/allocations`;
  const whole = doors["with credentials"].asked.filter(({ method, body }) => method === "POST" && body.trim() === CHANGE);
  assert.ok(new Set(whole.map(({ type }) => type)).has("text/plain"), JSON.stringify(whole));
  assert.ok(whole.length >= 3 * 6, JSON.stringify(whole));
  for (const { body } of whole) {
    const answer = await ask(allocations, "POST", { token, body });
    assert.equal(answer.status, 201, `${body}: ${await answer.text()}`);
    assert.equal((await ask(`${allocations}/taken`, "DELETE", { token })).status, 204);
  }
  assert.equal((await ask(`${allocations}/held`, "PATCH", { token, body: '{"cpus": 2}' })).status, 200);
  assert.equal((await ask(`${allocations}/held`, "DELETE", { token })).status, 204);
  assert.deepEqual(await held(daemon), []);
});

/** In the page: what it learns of the daemon at `url` in the ways that there are. */
async function read(url) {
  const learned = {};
  const tried = (name, made) => made.then((text) => { learned[name] = text; }, () => { learned[name] = ""; });
  const text = async (path, options) => (await fetch(url + path, options)).text();
  await tried("metrics", text("metrics"));
  await tried("with credentials", text("api/v1/topology", { credentials: "include" }));
  await tried("opaque", text("metrics", { mode: "no-cors" }));
  await tried("request", new Promise((resolve, reject) => {
    const asking = new XMLHttpRequest();
    asking.open("GET", `${url}api/v1/version`);
    Object.assign(asking, { onload: () => resolve(asking.responseText), onerror: reject });
    asking.send();
  }));
  await tried("stream", new Promise((resolve, reject) => {
    const source = new EventSource(`${url}api/v1/stream`);
    source.onopen = () => { source.close(); resolve("open"); };
    source.onerror = () => { source.close(); reject(); };
  }));
  await tried("script", new Promise((resolve, reject) => {
    const script = document.createElement("script");
    Object.assign(script, { src: `${url}page/format.js`, type: "module", onload: () => resolve("loaded"), onerror: reject });
    document.body.append(script);
  }));
  for (const [name, path] of [["frame", ""], ["frame of figures", "metrics"]]) {
    const frame = document.createElement("iframe");
    await new Promise((resolve) => {
      Object.assign(frame, { src: url + path, onload: resolve });
      document.body.append(frame);
    });
    learned[name] = frame.contentDocument?.body.textContent.trim() ?? "";
  }
  return learned;
}

const NOTHING = { metrics: "", "with credentials": "", opaque: "", request: "", stream: "", script: "", frame: "", "frame of figures": "" };

test("a page of others reads nothing, and shows nothing in a frame", async (t) => {
  const evil = await server(t);
  const urls = { "this host's": await start(t), "with guarantees": (await controlled(t)).reading };
  for (const [name, url] of Object.entries(urls)) {
    for (const host of [EVIL, "127.0.0.1", "localhost"]) {
      const page = await open(t, `http://${host}:${evil.port}/attack`);
      assert.deepEqual(await page.evaluate(read, url), NOTHING, `${name}, ${host}`);
      const frames = page.frames().map((frame) => frame.url());
      assert.ok(!frames.includes(url), `the page is in a frame: ${frames}`);
      // What is not a page of the daemon's is shown there.
      assert.ok(frames.includes(`${url}metrics`), `${frames}`);
    }
    // The daemon's own pages read all of it, but for those in a frame.
    const page = await open(t, `${url}runbooks/NumawardDown`);
    const { frame, ...learned } = await page.evaluate(read, url);
    assert.equal(frame, "", "not even in one of its own");
    assert.deepEqual(Object.keys(learned).filter((way) => learned[way] === ""), [], name);
    assert.match(learned.metrics, /numaward_/);
  }
});

/** In the page, whose own name leads to the daemon by now: what it reads and does there. */
async function rebound(change) {
  const status = async (path, options) => (await fetch(path, options)).status;
  const json = { "content-type": "application/json" };
  const allocations = "/api/v1/allocations";
  const answers = {
    metrics: await status("/metrics"),
    version: await status("/api/v1/version"),
    stream: await new Promise((resolve) => {
      const source = new EventSource("/api/v1/stream");
      source.onopen = () => { source.close(); resolve(200); };
      source.onerror = () => { source.close(); resolve(0); };
    }),
    page: await status("/"),
    read: (await (await fetch("/metrics")).text()).includes("numaward_"),
  };
  answers.admit = await status(allocations, { method: "POST", headers: json, body: change });
  answers.resize = await status(`${allocations}/held`, { method: "PATCH", headers: json, body: '{"cpus": 2}' });
  answers.release = await status(`${allocations}/held`, { method: "DELETE" });
  return answers;
}

test("a name that leads to this host later is not the daemon's", async (t) => {
  const daemon = await controlled(t);
  const reading = await server(t, daemon.reading);
  const changing = await server(t, daemon.changing, { authorization: `Bearer ${daemon.token}` });
  const visit = async (name, port) => (await open(t, `http://${name}:${port}/attack`)).evaluate(rebound, CHANGE);
  const refused = { metrics: 421, version: 421, stream: 0, page: 421, read: false, admit: 421, resize: 421, release: 421 };
  for (const { port } of [reading, changing]) {
    assert.deepEqual(await visit(EVIL, port), refused);
    assert.deepEqual(await held(daemon), ["held 1"]);
  }
  assert.ok(changing.asked.every(({ host }) => host === `${EVIL}:${changing.port}`), JSON.stringify(changing.asked));
  // By a name of the configuration, the same page does all of it.
  const readers = { metrics: 200, version: 200, stream: 200, read: true };
  const nothing = { admit: 405, resize: 404, release: 404 };
  assert.deepEqual(await visit(KNOWN, reading.port), { ...readers, page: 200, ...nothing });
  assert.deepEqual(await held(daemon), ["held 1"]);
  assert.deepEqual(await visit(KNOWN, changing.port), { ...readers, page: 404, admit: 201, resize: 200, release: 204 });
  assert.deepEqual(await held(daemon), ["taken 2"]);
});
