// Debian's Chromium, driven by playwright-core.

import { chromium } from 'playwright-core';

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
