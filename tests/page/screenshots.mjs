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
  await page.setViewport({ width: 1280, height: 1180 });
  await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: "light" }]);
  await page.goto(url);
  await page.waitForFunction(() => document.querySelectorAll("#rows tr[data-key]").length >= 4, PATIENCE);
  const { count } = await agree(page, url);
  console.log(`the page agrees with /metrics in ${count} figures`);

  // Some nodes are seen to use the memory of others.
  await page.click("#matrix-kind input[value=accesses]");
  await page.waitForFunction(() => [...document.querySelectorAll("#matrix tbody tr")].some((row, from) => (
    [...row.querySelectorAll("td")].some((cell, to) => from !== to && Number(cell.textContent) > 0)
  )), PATIENCE);
  await page.screenshot({ path: `${folder}/page-light.png` });

  const open = (name) => page.evaluate((name) => {
    const buttons = [...document.querySelectorAll("#rows tr[data-key] button")];
    buttons.find((button) => button.textContent.endsWith(name)).click();
  }, name);
  await open("guarded");
  await page.waitForSelector("#detail[open]");
  // Some of its history, and all of its decision.
  await page.waitForFunction(() => (
    document.querySelector("#detail-body .history polyline")?.getAttribute("points").split(" ").length >= 90
      && document.querySelector("#detail-body").textContent.includes("Accepted: nodes")
  ), PATIENCE);
  await page.setViewport({ width: 1280, height: 1500 });
  const box = await (await page.$("#detail")).boundingBox();
  await page.screenshot({ path: `${folder}/page-detail.png`, clip: box });
  await page.keyboard.press("Escape");

  await page.setViewport({ width: 1280, height: 1180 });
  await page.click("#theme");
  await page.screenshot({ path: `${folder}/page-dark.png` });
  if (said.length > 0) throw new Error(`the page has said on the console:\n${said.join("\n")}`);
} finally {
  await browser.close();
}
