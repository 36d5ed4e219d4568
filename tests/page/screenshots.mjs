// Pictures of the page of the demo's daemon, for the book: node screenshots.mjs fix|book URL FOLDER
//
// `fix` waits until the page says that a guarantee is broken and by whom, prints `red`, and when it has read a line, waits until the same page says that
// all are kept. `book` makes the other pictures, and one of a large host that is made up.

import puppeteer from "puppeteer-core";
import { agree } from "./agree.mjs";
import { scene } from "./scene.mjs";

const CHROMIUM = process.env.CHROMIUM ?? "/usr/bin/chromium";
/** For what comes by itself, on a busy host. */
const PATIENCE = { timeout: 300_000 };
/** Steps of five seconds of which there is a past when the pictures are taken. */
const PAST = 80;
const [what, url, folder] = process.argv.slice(2);

const browser = await puppeteer.launch({ executablePath: CHROMIUM, args: ["--no-sandbox", "--disable-dev-shm-usage"], protocolTimeout: 2 * PATIENCE.timeout });
try {
  const page = await browser.newPage();
  const said = [];
  page.on("console", (message) => said.push(`${message.type()}: ${message.text()}`));
  page.on("pageerror", (error) => said.push(String(error)));
  await page.setViewport({ width: 1280, height: 720 });
  await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: "light" }]);
  await page.goto(url);
  await page.waitForFunction(() => document.querySelectorAll("#rows tr[data-key]").length >= 4, PATIENCE);
  if (what === "fix") {
    const shows = async (words, name) => {
      // With its guarantee as we have it, and the memory of the one that is wrong, or was.
      await page.waitForFunction((words) => {
        const rows = [...document.querySelectorAll("#rows tr[data-key]")].map((row) => row.textContent);
        return document.querySelector("#verdict").textContent.startsWith(words)
          && rows.some((row) => row.startsWith("database") && row.includes("64."));
      }, PATIENCE, words);
      await page.screenshot({ path: `${folder}/demo-${name}.png` });
    };
    await shows("1 guarantee broken: database ran on CPU", "broken");
    console.log("red");
    // Goes on when it is fixed.
    await new Promise((resolve) => process.stdin.once("data", resolve));
    await shows("all 2 guarantees kept", "kept");
    process.stdin.destroy();
  } else await book(page);
  if (said.length > 0) throw new Error(`the page has said on the console:\n${said.join("\n")}`);
} finally {
  await browser.close();
}

async function book(page) {
  const { count } = await agree(page, url);
  console.log(`the page agrees with /metrics in ${count} figures`);

  // Some nodes are seen to use the memory of others, and there is some past.
  await page.waitForFunction(() => [...document.querySelectorAll("#matrix tbody tr")].some((row, from) => (
    [...row.querySelectorAll("td")].some((cell, to) => from !== to && Number.parseInt(cell.textContent, 10) > 0)
  )), PATIENCE);
  const past = async () => (await (await fetch(new URL("api/v1/history", url))).json()).recent.missedBytesPerSecond.length;
  while ((await past()) < PAST) await new Promise((resolve) => setTimeout(resolve, 2000));
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

  await page.setViewport({ width: 1280, height: 720 });
  await page.click("#theme");
  await page.screenshot({ path: `${folder}/page-dark.png` });

  const host = await scene().start();
  const ticks = setInterval(() => host.tick(), 1000);
  await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: "light" }]);
  await page.setViewport({ width: 1600, height: 1100 });
  await page.goto(host.url);
  // The guarantee that is broken, and by whom; and some accesses between nodes.
  await page.waitForFunction(() => document.querySelector("#verdict").textContent.includes("backup.service ran on CPU"), PATIENCE);
  await new Promise((resolve) => setTimeout(resolve, 8000));
  await page.screenshot({ path: `${folder}/page-large.png` });
  await page.goto("about:blank");
  clearInterval(ticks);
  await host.stop();
}
