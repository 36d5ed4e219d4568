// Pictures of the page of a running daemon, for the book: node screenshots.mjs URL FOLDER

import puppeteer from "puppeteer-core";
import { agree } from "./agree.mjs";

const CHROMIUM = process.env.CHROMIUM ?? "/usr/bin/chromium";
const [url, folder] = process.argv.slice(2);

const browser = await puppeteer.launch({ executablePath: CHROMIUM, args: ["--no-sandbox", "--disable-dev-shm-usage"] });
try {
  const page = await browser.newPage();
  await page.setViewport({ width: 1200, height: 820 });
  await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: "light" }]);
  await page.goto(url);
  await page.waitForFunction(() => document.querySelectorAll("#rows tr[data-key]").length >= 4, { timeout: 60_000 });
  const { count } = await agree(page, url);
  console.log(`the page agrees with /metrics in ${count} figures`);
  await page.screenshot({ path: `${folder}/page-light.png` });
  await page.click("#theme");
  await page.screenshot({ path: `${folder}/page-dark.png` });
  await page.evaluate(() => [...document.querySelectorAll("#rows tr[data-key] button")].find((button) => button.textContent.endsWith("guarded"))?.click());
  await page.waitForSelector("#detail[open]", { timeout: 60_000 });
  await page.screenshot({ path: `${folder}/page-detail.png` });
} finally {
  await browser.close();
}
