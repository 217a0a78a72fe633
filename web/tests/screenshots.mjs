// Pictures of every view, of a world that is the same each time: `node screenshots.mjs [DIRECTORY]`.

import { mkdir } from 'node:fs/promises';
import { join } from 'node:path';
import { launch, openPage } from './browser.mjs';
import { startMock } from './mock.mjs';

const out = process.argv[2] ?? join(import.meta.dirname, '../../docs/screenshots');
const ALL = ['now', 'flows', 'apps', 'peers', 'events', 'gains', 'settings'];
const SIZES = [
  ['wide', 1440, 900],
  ['phone', 360, 740],
];
// What the documentation shows; `ALL=1` takes every view in every size and colour.
const WANTED = {
  'wide-light': ['now', 'flows', 'apps', 'settings', 'gains'],
  'wide-dark': ['now'],
  'phone-light': ['flows'],
  'phone-dark': ['now'],
};

await mkdir(out, { recursive: true });
const mock = await startMock({ live: false, flows: 60 });
mock.note('link', 'warning', 'wwan0 went dark; 12 flows moved to wlan0, 3 ended');
for (let second = 0; second < 21; second += 1) mock.tick();
mock.note('link', 'info', 'wwan0 is back after 21 s');
const browser = await launch();
for (const [size, width, height] of SIZES) {
  for (const dark of [false, true]) {
    const page = await openPage(browser, mock.url, { width, height, dark, clock: mock.at });
    await page.locator('[data-link="wlan0"]').first().waitFor();
    for (let second = 0; second < 12; second += 1) {
      mock.tick();
      await page.waitForTimeout(60);
      await page.clock.runFor(1000);
    }
    const colours = dark ? 'dark' : 'light';
    for (const view of process.env.ALL ? ALL : WANTED[`${size}-${colours}`]) {
      await page.evaluate((name) => {
        location.hash = `#/${name}`;
      }, view);
      await page.waitForFunction((name) => document.querySelector('main').dataset.view === name, view);
      await page.clock.runFor(500);
      await page.waitForTimeout(300);
      await page.screenshot({ path: join(out, `${view}-${size}-${colours}.png`), fullPage: size === 'wide' && view === 'settings' });
    }
    if (page.problems.length) throw new Error(page.problems.join('\n'));
    await page.context().close();
  }
}
await browser.close();
await mock.stop();
