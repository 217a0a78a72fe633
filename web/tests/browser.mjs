// Debian's Chromium, driven by playwright-core.

import assert from 'node:assert/strict';
import { readFile } from 'node:fs/promises';
import { createRequire } from 'node:module';
import { chromium } from 'playwright-core';
import { startMock } from './mock.mjs';

const AXE = createRequire(import.meta.url).resolve('axe-core/axe.min.js');
const EXECUTABLE = process.env.CHROMIUM ?? '/usr/bin/chromium';

/** Chromium's sandbox cannot start as root, as in test containers; the pages are our own. */
export const launch = (executablePath = EXECUTABLE) =>
  chromium.launch({ executablePath, args: process.getuid?.() === 0 ? ['--no-sandbox'] : [] });

/** Opens a page at `url`. Any error, blocked resource or console message fails the test. */
export async function openPage(browser, url, { width = 1440, height = 900, dark = false, clock = null } = {}) {
  const context = await browser.newContext({
    viewport: { width, height },
    colorScheme: dark ? 'dark' : 'light',
    timezoneId: 'Europe/Berlin',
    locale: 'en-GB',
    reducedMotion: 'reduce',
  });
  const page = await context.newPage();
  page.problems = [];
  page.on('pageerror', (error) => page.problems.push(String(error)));
  page.on('console', (message) => ['error', 'warning'].includes(message.type()) && page.problems.push(message.text()));
  if (clock !== null) await page.clock.install({ time: clock });
  await page.goto(url);
  return page;
}

/** Runs `body(page, mock)` on a new page of a mock; fails if the page reports an error. */
export async function visit(browser, options, body) {
  const mock = await startMock(options);
  const page = await openPage(browser, mock.url + (options.path ?? ''), options);
  try {
    await body(page, mock);
    assert.deepEqual(
      page.problems.filter((text) => !options.expected?.test(text)),
      [],
    );
  } finally {
    await page.context().close();
    await mock.stop();
  }
}

/** Fails if axe finds a serious problem on the page. */
export async function examine(page, where) {
  if (!(await page.evaluate(() => 'axe' in window))) await page.evaluate(await readFile(AXE, 'utf8'));
  const { violations } = await page.evaluate(() => window.axe.run(document, { resultTypes: ['violations'] }));
  const serious = violations
    .filter(({ impact }) => ['serious', 'critical'].includes(impact))
    .map(
      ({ id, nodes }) =>
        `${id}: ${nodes
          .slice(0, 3)
          .map((node) => `${node.target} ${node.failureSummary}`)
          .join('; ')}`,
    );
  assert.deepEqual(serious, [], where);
}
