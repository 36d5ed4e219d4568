// The page of a real daemon on this host: what it shows is what /metrics says.

import assert from "node:assert/strict";
import { test } from "node:test";
import puppeteer from "puppeteer-core";
import { agree, range } from "./agree.mjs";
import { CHROMIUM, start } from "./daemon.mjs";

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
