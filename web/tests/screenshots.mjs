// Screenshots of every view, with a real daemon in an emulated network with real programs: `node screenshots.mjs [DIRECTORY]`, as root,
// with the programs in BRAID and BRAID_LAB; see `make screenshots`. It takes about six minutes; the first of them build up the history.

import { mkdir } from 'node:fs/promises';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { launch, openPage } from './browser.mjs';
import { startHeld } from './held.mjs';

const { BRAID, BRAID_LAB, ALL } = process.env;
const out = process.argv[2] ?? join(import.meta.dirname, '../../docs/screenshots');
const VIEWS = ['now', 'flows', 'apps', 'clients', 'peers', 'events', 'gains', 'settings'];
const SIZES = { wide: [1440, 900], phone: [360, 740] };
// The screenshots of the documentation; `ALL=1` takes every view in every size and colour.
const WANTED = {
  'wide-light': ['now', 'flows', 'apps', 'clients', 'settings', 'gains', 'events', 'peers'],
  'wide-dark': ['now'],
  'phone-light': ['flows'],
  'phone-dark': ['now'],
};
const [BEFORE_S, DARK_S, AFTER_S] = [150, 45, 100];

if (!BRAID || !BRAID_LAB) throw new Error('BRAID and BRAID_LAB must name the programs');
await mkdir(out, { recursive: true });
const held = await startHeld(BRAID, BRAID_LAB);
let browser;
try {
  await held.play();
  await sleep(BEFORE_S * 1000);
  await held.turn('wlan0', true);
  await sleep(DARK_S * 1000);
  await held.turn('wlan0', false);
  await sleep(AFTER_S * 1000);
  browser = await launch();
  for (const [size, [width, height]] of Object.entries(SIZES)) for (const dark of [false, true]) await takeAll(size, width, height, dark);
} finally {
  await browser?.close();
  await held.stop();
}

async function takeAll(size, width, height, dark) {
  const page = await openPage(browser, held.url, { width, height, dark });
  await page.locator('[data-link="wwan0"]').first().waitFor();
  const colours = dark ? 'dark' : 'light';
  for (const view of ALL ? VIEWS : WANTED[`${size}-${colours}`]) {
    await page.evaluate((name) => {
      location.hash = `#/${name}`;
    }, view);
    await page.locator(`main[data-view="${view}"]`).waitFor();
    // Rates of flows are available from the third second on, and lists are then sorted.
    await sleep(5000);
    await page.screenshot({ path: join(out, `${view}-${size}-${colours}.png`) });
  }
  if (page.problems.length) throw new Error(page.problems.join('\n'));
  await page.context().close();
}
