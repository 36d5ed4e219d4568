// A daemon on this host, for the tests.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";

export const CHROMIUM = process.env.CHROMIUM ?? "/usr/bin/chromium";

/** Starts the daemon on a free port; it writes nothing to the kernel. The address at which it serves. */
export async function start(t, env = {}) {
  const program = process.env.NUMAWARD;
  assert.ok(program, "NUMAWARD names the daemon's program; `cargo xtask test page` builds it");
  const directory = await mkdtemp(join(tmpdir(), "numaward-page-"));
  const daemon = spawn(program, ["run", "--listen", "127.0.0.1:0", "--log-format", "json"], {
    env: {
      ...process.env,
      NUMAWARD_STATE_DIRECTORY: join(directory, "state"),
      NUMAWARD_CONTROL_SOCKET: join(directory, "control.sock"),
      NUMAWARD_ENFORCEMENT_MODE: "dry-run",
      ...env,
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

/** Starts the daemon on a host of plain files, where guarantees can be given, with an address for changes. */
export async function controlled(t) {
  const program = process.env.CONTROLLED_NUMAWARD;
  assert.ok(program, "CONTROLLED_NUMAWARD names the daemon's test `control`; `cargo xtask test page` builds it");
  const daemon = spawn(program, ["--exact", "both_addresses_serve", "--nocapture"], {
    env: { ...process.env, NUMAWARD_TEST_UNTIL_INPUT_ENDS: "1" },
    stdio: ["pipe", "pipe", "inherit"],
  });
  t.after(async () => {
    const ended = new Promise((resolve) => daemon.on("exit", resolve));
    if (daemon.exitCode === null) {
      daemon.stdin.end();
      await ended;
    }
  });
  for await (const line of createInterface(daemon.stdout)) {
    if (!line.startsWith("{")) continue;
    daemon.stdout.resume();
    const { reading, changing, ...more } = JSON.parse(line);
    return { reading: `http://${reading}/`, changing: `http://${changing}/`, ...more };
  }
  throw new Error("the daemon does not serve");
}
