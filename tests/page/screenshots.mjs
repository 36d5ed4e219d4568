// Pictures of the page of a running daemon, for the book: node screenshots.mjs URL FOLDER

import puppeteer from "puppeteer-core";
import { agree } from "./agree.mjs";

const CHROMIUM = process.env.CHROMIUM ?? "/usr/bin/chromium";
/** For what comes by itself, on a busy host. */
const PATIENCE = { timeout: 300_000 };
const [url, folder] = process.argv.slice(2);

const browser = await puppeteer.launch({ executablePath: CHROMIUM, args: ["--no-sandbox", "--disable-dev-shm-usage"] });
try {
  const page = await browser.newPage();
  const said = [];
  page.on("console", (message) => said.push(`${message.type()}: ${message.text()}`));
  page.on("pageerror", (error) => said.push(String(error)));
  await page.setViewport({ width: 1280, height: 960 });
  await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: "light" }]);
  await page.goto(url);
  await page.waitForFunction(() => document.querySelectorAll("#rows tr[data-key]").length >= 4, PATIENCE);
  const { count } = await agree(page, url);
  console.log(`the page agrees with /metrics in ${count} figures`);

  // Some nodes are seen to use the memory of others, and there is some past.
  await page.waitForFunction(() => [...document.querySelectorAll("#matrix tbody tr")].some((row, from) => (
    [...row.querySelectorAll("td")].some((cell, to) => from !== to && Number.parseInt(cell.textContent, 10) > 0)
  )), PATIENCE);
  const waited = performance.now();
  const past = async () => (await (await fetch(new URL("api/v1/history", url))).json()).recent.missedBytesPerSecond.length;
  while ((await past()) < 40 && performance.now() - waited < PATIENCE.timeout) await new Promise((resolve) => setTimeout(resolve, 2000));
  // As somebody sees it who opens it now.
  await page.reload();
  await page.waitForFunction(() => document.querySelectorAll("#rows tr[data-key]").length >= 4 && document.querySelector("#rows .spark path"), PATIENCE);
  await page.waitForFunction(() => document.querySelector("#matrix-kind input[value=accesses]").checked && document.querySelector("#verdict").textContent.includes("probes"), PATIENCE);
  await new Promise((resolve) => setTimeout(resolve, 10_000));
  await page.screenshot({ path: `${folder}/page-light.png` });

  const open = (name) => page.evaluate((name) => {
    const links = [...document.querySelectorAll("#rows tr[data-key] a")];
    links.find((link) => link.textContent.endsWith(name)).click();
  }, name);
  await open("guarded");
  await page.waitForSelector("#detail[open]");
  // Some of its history, and all of its decision.
  await page.waitForFunction(() => (
    document.querySelector("#detail-body .chart path.local")?.getAttribute("d").split(/[ML]/).length >= 30
      && document.querySelector("#detail-body .decision")
  ), PATIENCE);
  await page.click("#detail-body .decision summary");
  await page.setViewport({ width: 1280, height: 1500 });
  const box = await (await page.$("#detail")).boundingBox();
  await page.screenshot({ path: `${folder}/page-detail.png`, clip: box });
  await page.keyboard.press("Escape");

  await page.setViewport({ width: 1280, height: 960 });
  await page.click("#theme");
  await page.screenshot({ path: `${folder}/page-dark.png` });
  if (said.length > 0) throw new Error(`the page has said on the console:\n${said.join("\n")}`);
} finally {
  await browser.close();
}
