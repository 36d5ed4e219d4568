// The page in a real browser: what it shows, that it can be used without a mouse and without colours, that it
// stays quick with many workloads, and that nothing of what a workload is called can break it.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { mkdir, readFile } from "node:fs/promises";
import { createRequire } from "node:module";
import puppeteer from "puppeteer-core";
import { EVIL, Host } from "./host.mjs";

const AXE = await readFile(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const CHROMIUM = process.env.CHROMIUM ?? "/usr/bin/chromium";
/** Where screenshots go, if anywhere. */
const SCREENSHOTS = process.env.SCREENSHOTS;

let browser;
before(async () => {
  browser = await puppeteer.launch({ executablePath: CHROMIUM, args: ["--no-sandbox", "--disable-dev-shm-usage"] });
});
after(() => browser.close());

/** A page of a host with `count` workloads; fails the test for anything on the console. */
async function open(t, count, change = () => {}) {
  const host = await new Host(count, change).start();
  const page = await browser.newPage();
  await page.setViewport({ width: 1400, height: 1000 });
  const said = [];
  page.on("console", (message) => said.push(`${message.type()}: ${message.text()}`));
  page.on("pageerror", (error) => said.push(String(error)));
  page.on("dialog", (dialog) => {
    said.push(`dialog: ${dialog.message()}`);
    dialog.dismiss();
  });
  t.after(async () => {
    await page.close();
    await host.stop();
  });
  await page.goto(host.url);
  await page.waitForSelector("#rows tr[data-key]");
  return { host, page, said };
}

async function shot(page, name) {
  if (!SCREENSHOTS) return;
  await mkdir(SCREENSHOTS, { recursive: true });
  await page.screenshot({ path: `${SCREENSHOTS}/${name}.png` });
}

const text = (page, selector) => page.$eval(selector, (element) => element.textContent);

test("it shows the machine, the workloads and what happens", async (t) => {
  const { host, page, said } = await open(t, 40);
  host.tick();
  await page.waitForFunction(() => document.querySelectorAll(".cpu[data-state=exclusive]").length === 4);
  assert.equal(await page.$$eval(".node", (nodes) => nodes.length), 4);
  assert.equal(await page.$$eval(".socket h3", (titles) => titles.map((title) => title.textContent).join()), "Socket 0: 16 cores,Socket 1: 8 cores,Without CPUs");
  assert.match(await text(page, "#count"), /^40$/);
  assert.match(await text(page, "#link"), /^live, up 1 min/);
  host.report({ id: 7, time: "2026-01-01T00:00:00Z", kind: "oom_kill", severity: "critical", workload: "worker-3", message: "a process was killed", suppressed: 0 });
  await page.waitForFunction(() => document.querySelector("#events").textContent.includes("a process was killed"));
  await shot(page, "light");
  await page.click("#theme");
  assert.equal(await page.$eval("html", (html) => html.dataset.theme), "dark");
  await shot(page, "dark");
  assert.deepEqual(said, []);
  assert.ok(host.requests.every((path) => path.startsWith("/")), "nothing is fetched from elsewhere");
});

test("a node whose CPUs are on several sockets is shown once", async (t) => {
  const { host, page, said } = await open(t, 3, (topology) => {
    topology.sockets = [
      { socket: 3, cpus: "16-23", nodes: "2", cores: 8 },
      { socket: 1, cpus: "1-7", nodes: "0", cores: 7 },
      { socket: 0, cpus: "0", nodes: "0", cores: 1 },
      { socket: 2, cpus: "8", nodes: "1", cores: 1 },
    ];
    topology.nodes[1].cpus = "8";
  });
  host.tick();
  const titles = () => page.$$eval(".socket h3", (titles) => titles.map((title) => title.textContent).join("; "));
  assert.equal(await titles(), "Sockets 0, 1: 8 cores; Socket 2: 1 core; Socket 3: 8 cores; Without CPUs");
  const cards = await page.$$eval(".node", (cards) => cards.map((card) => [card.querySelector("h4").textContent, card.querySelectorAll("dd").length]));
  assert.deepEqual(cards.map(([title]) => title), ["Node 0 CPUs 0-7", "Node 1 CPU 8", "Node 2 CPUs 16-23", "Node 3 memory only"]);
  assert.ok(cards.every(([, figures]) => figures >= 4), "all have figures");
  assert.deepEqual(said, []);
});

test("a workload's decision and history open by keyboard and close by Escape", async (t) => {
  const { host, page, said } = await open(t, 40);
  host.tick();
  await page.focus("#filter");
  await page.keyboard.type("database");
  await page.waitForFunction(() => document.querySelectorAll("#rows tr[data-key]").length === 1);
  await page.focus("#rows tr[data-key] button");
  await page.keyboard.press("Enter");
  await page.waitForSelector("#detail[open]");
  await page.waitForFunction(() => document.querySelector("#detail-body").textContent.includes("Accepted: nodes 0."));
  const body = await text(page, "#detail-body");
  for (const words of ["cpuset.mems", "8.00 GiB", "best", "Memory by node", "0-3; left: somebody else keeps writing it", "the same"]) assert.ok(body.includes(words), words);
  await shot(page, "detail");
  await page.keyboard.press("Escape");
  await page.waitForFunction(() => !document.querySelector("#detail").open);
  assert.deepEqual(said, []);
});

test("a workload that is opened right after another was closed shows the latest figures", async (t) => {
  const { host, page, said } = await open(t, 40);
  await page.click('#rows tr[data-key="/system.slice/database.service"] button');
  await page.waitForSelector("#detail[open]");
  const figures = () => page.$eval("#detail-body table", (table) => table.textContent);
  // The browser reports that it was closed in a task of its own, after this one.
  await page.evaluate(() => new Promise((resolve) => {
    const dialog = document.querySelector("#detail");
    dialog.addEventListener("close", () => resolve(), { once: true });
    dialog.close();
    document.querySelector('#rows tr[data-key="/evil"] button').click();
  }));
  const before = await figures();
  host.tick();
  await page.waitForFunction((before) => document.querySelector("#detail-body table").textContent !== before, { timeout: 10_000 }, before);
  assert.deepEqual(said, []);
});

test("it shows who uses memory of other nodes and who runs where they should not", async (t) => {
  const { host, page, said } = await open(t, 40);
  const cells = () => page.$$eval("#matrix tbody td", (cells) => cells.map((cell) => cell.textContent).join());
  assert.match(await cells(), /^10,21,21,21,21,10/, "distances at first");
  await page.click("#matrix-kind input[value=accesses]");
  await page.waitForFunction(() => document.querySelector("#matrix-says").textContent.includes("last minute"));
  host.tick();
  host.tick();
  await page.waitForFunction(() => document.querySelector("#matrix td:nth-of-type(3)") && document.querySelector("#matrix tbody td").textContent === "200");
  assert.equal(await cells(), "200,–,20,–,–,200,–,–,–,–,200,–,–,–,–,–", "what was seen since the page was opened");
  assert.match(await text(page, "#matrix"), /The kernel samples 39 of 40 workloads/);
  assert.ok(await page.$eval("#matrix .scroll", (table) => table.scrollWidth <= table.clientWidth), "nothing is cut off");
  const short = await page.evaluate(async () => {
    const { short } = await import("/page/format.js");
    return [0, 9999, 10000, 18999, 999999, 1000000, 12345678].map(short);
  });
  assert.deepEqual(short, ["0", "9999", "10k", "18k", "999k", "1M", "12M"]);
  const intruded = () => page.$$eval(".cpu[data-state=intruded]", (cpus) => cpus.map((cpu) => cpu.title));
  assert.deepEqual(await intruded(), []);
  host.intruded = true;
  host.tick();
  await page.waitForSelector(".cpu[data-state=intruded]");
  assert.deepEqual(await intruded(), ["CPU 3: exclusive to database, but others ran there within the last minute"]);
  await shot(page, "accesses");
  await page.click('#rows tr[data-key="/system.slice/database.service"] button');
  await page.waitForFunction(() => document.querySelector("#detail-body").textContent.includes("Who else ran there"));
  const body = await text(page, "#detail-body");
  for (const words of ["because it may use one node only", "node 1: 5, 2 moved at once", "0.020 s", "1.235 s"]) assert.ok(body.includes(words), words);
  await shot(page, "intruders");
  assert.deepEqual(said, []);
});

test("rows are sorted and filtered", async (t) => {
  const { page } = await open(t, 40);
  const names = () => page.$$eval("#rows tr[data-key] th", (cells) => cells.slice(0, 3).map((cell) => cell.textContent.slice(0, 12)));
  assert.equal((await names())[0], "database", "the largest first");
  await page.click("#head th:first-child button");
  assert.equal(await page.$eval("#head th:first-child", (head) => head.ariaSort), "ascending");
  assert.deepEqual((await names()).slice(1), ["database", "unknown"]);
  await page.type("#filter", "node:2 worker-1");
  await page.waitForFunction(() => document.querySelector("#count").textContent.startsWith("3 of 40"));
});

test("a name is text, whatever is in it", async (t) => {
  const { page, said } = await open(t, 3);
  await page.click('#rows tr[data-key="/evil"] button');
  await page.waitForSelector("#detail[open]");
  assert.equal(await text(page, "#detail-title"), EVIL);
  assert.equal(await page.$$eval("img:not([src='page/icon.svg'])", (images) => images.length), 0);
  assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth), "nothing sticks out");
  assert.deepEqual(said, []);
});

test("what is not known is no zero", async (t) => {
  const { host, page } = await open(t, 3);
  host.tick();
  const cells = await page.$$eval("#rows tr[data-key='/unknown'] td", (cells) => cells.map((cell) => cell.textContent));
  assert.deepEqual(cells, ["", "–", "–", "–", "–", "–"]);
  await page.click("#rows tr[data-key='/unknown'] button");
  await page.waitForSelector("#detail[open]");
  const body = await text(page, "#detail-body");
  assert.ok(body.includes("– resident") && body.includes("What it allocates is not counted."), body);
});

test("it connects again when the daemon was away, and says so meanwhile", async (t) => {
  const { host, page } = await open(t, 3);
  host.cut();
  await page.waitForFunction(() => document.querySelector("#link").dataset.state === "stale");
  await page.waitForFunction(() => document.querySelector("#link").dataset.state === "live", { timeout: 30_000 });
});

for (const theme of ["light", "dark"]) {
  test(`it is accessible, ${theme}`, async (t) => {
    const { host, page } = await open(t, 40);
    host.tick();
    host.report({ id: 7, time: "2026-01-01T00:00:00Z", kind: "miss", severity: "warning", workload: "database", node: 1, message: "pages on node 1", suppressed: 2 });
    if (theme === "dark") await page.click("#theme");
    const check = async () => {
      const violations = await page.evaluate(async (source) => {
        // The page's own policy forbids added scripts; the test may evaluate them.
        if (!window.axe) (0, eval)(source);
        return (await window.axe.run()).violations.map(({ id, nodes }) => `${id}: ${nodes.map(({ html }) => html).join(" | ")}`);
      }, AXE);
      assert.deepEqual(violations, []);
    };
    await page.setBypassCSP(true);
    await page.reload();
    await page.waitForSelector("#rows tr[data-key]");
    await check();
    await page.click("#rows tr[data-key] button");
    await page.waitForSelector("#detail[open]");
    await check();
  });
}

test("a thousand workloads cost no more rows than are in sight, and updates are measured", async (t) => {
  const { host, page, said } = await open(t, 1000);
  for (let turn = 0; turn < 20; turn += 1) {
    const seen = await page.evaluate(() => performance.getEntriesByName("numaward-update").length);
    host.tick();
    await page.waitForFunction((seen) => performance.getEntriesByName("numaward-update").length > seen, {}, seen);
  }
  const rows = await page.$$eval("#rows tr[data-key]", (rows) => rows.length);
  assert.ok(rows < 60, `${rows} rows in the document`);
  const times = await page.evaluate(() => performance.getEntriesByName("numaward-update").map((entry) => entry.duration).sort((a, b) => a - b));
  t.diagnostic(`an update of 1,000 workloads: median ${times[times.length >> 1].toFixed(1)} ms, longest ${times.at(-1).toFixed(1)} ms (budget 100 ms)`);
  await page.$eval("#table", (box) => box.scrollTo(0, box.scrollHeight));
  await page.waitForFunction(() => document.querySelector('#rows tr[data-key="/work.slice/worker-999.service"]'));
  assert.deepEqual(said, []);
});

test("it fits a narrow screen", async (t) => {
  const { page } = await open(t, 40);
  await page.setViewport({ width: 390, height: 800 });
  assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth));
  await shot(page, "narrow");
});
