// The page with a real daemon in a lab. Needs root, and the program in BRAID; see `make test-ui`.

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { after, before, test } from 'node:test';
import { launch, openPage } from './browser.mjs';
import { LINKS, PHONE, startLab, until } from './lab.mjs';

const { BRAID } = process.env;
const skip = BRAID ? false : 'BRAID is not set to a program';

let browser;
let lab;
before(async () => {
  if (skip) return;
  lab = await startLab(BRAID);
  browser = await launch();
});
after(async () => {
  await browser?.close();
  await lab?.stop();
});

const go = async (page, view) => {
  await page.locator(`#nav a[data-view="${view}"]`).click();
  await page.locator(`main[data-view="${view}"]`).waitFor();
};

const apply = (page) => page.getByRole('button', { name: 'Apply', exact: true }).click();
const linkOfRow = (page, filter) =>
  page.locator('.rows .tr:not([hidden])').filter({ hasText: filter }).locator('.c-link').allTextContents();

for (const [width, height] of [
  [1440, 900],
  [360, 740],
]) {
  test(`sees links and flows, at ${width} px`, { skip }, async () => {
    const flows = Array.from({ length: 6 }, () => lab.download());
    const page = await openPage(browser, lab.url, { width, height });
    for (const name of LINKS) await page.locator(`.link[data-link="${name}"]`).getByText('Up', { exact: true }).waitFor();
    await go(page, 'flows');
    await until('flows of curl', async () => (await linkOfRow(page, 'curl')).length >= 6);
    await page.waitForFunction(() =>
      [...document.querySelectorAll('.rows .c-down')].some((cell) => /[1-9].* [kM]bit/.test(cell.textContent)),
    );
    flows.forEach((flow) => flow.kill());
    assert.deepEqual(page.problems, []);
    await page.context().close();
  });
}

test('pins an application to a link, new flows follow, and it is undone', { skip }, async () => {
  const first = lab.download();
  const page = await openPage(browser, `${lab.url}/#/flows`);
  // Flows of the previous test may still be listed.
  await until('the first flow alone', async () => (await linkOfRow(page, 'curl')).length === 1);
  await page.locator('.rows .tr:not([hidden])').filter({ hasText: 'curl' }).first().click();
  await page.getByRole('button', { name: 'Choose links for this program…' }).click();
  await page.getByText('Only these').click();
  await page.locator('.checks').getByText('lab2').click();
  await page.locator('dialog').getByRole('button', { name: 'Preview…' }).click();
  await page.locator('.line.added').getByText('links = ["lab2"]').waitFor();
  await apply(page);
  await page.getByRole('button', { name: 'Undo', exact: true }).waitFor();
  assert.match(readFileSync(lab.config, 'utf8'), /name = "lab0" {3}# kept[\s\S]*links = \["lab2"\]/);
  first.kill();
  await until('the first flow to end', async () => (await linkOfRow(page, 'curl')).length === 0);
  const later = [lab.download(), lab.download(), lab.download()];
  await until('three new flows', async () => (await linkOfRow(page, 'curl')).length === 3);
  assert.deepEqual(await linkOfRow(page, 'curl'), ['lab2', 'lab2', 'lab2']);
  await page.getByRole('button', { name: 'Undo', exact: true }).click();
  await page.getByText('The last change is undone').waitFor();
  assert.doesNotMatch(readFileSync(lab.config, 'utf8'), /lab2"\]/);
  later.forEach((flow) => flow.kill());
  assert.deepEqual(page.problems, []);
  await page.context().close();
});

test('drags α', { skip }, async () => {
  const page = await openPage(browser, `${lab.url}/#/settings`);
  const slider = page.getByLabel('Utility of throughput');
  await slider.scrollIntoViewIfNeeded();
  await page.getByLabel('α follows').selectOption('fixed');
  const box = await slider.boundingBox();
  await page.mouse.move(box.x + box.width - 8, box.y + box.height / 2);
  await page.mouse.down();
  await page.mouse.move(box.x + box.width / 2, box.y + box.height / 2, { steps: 5 });
  assert.match(await slider.getAttribute('aria-valuetext'), /^50 %: /);
  await page.mouse.up();
  await page.getByRole('region', { name: 'Speed against energy' }).getByRole('button', { name: 'Preview…' }).click();
  await apply(page);
  await page.locator('.facts').getByText('operetta').waitFor();
  assert.match(readFileSync(lab.config, 'utf8'), /scheduler = "operetta"[\s\S]*utility = 0\.5/);
  assert.deepEqual(page.problems, []);
  await page.context().close();
});

test('sees a client of the gateway, its rate, and why its flow has its link', { skip }, async () => {
  // Its link is up before the daemon has the rules.
  let flow = lab.downloadOnPhone();
  const page = await openPage(browser, `${lab.url}/#/clients`);
  const row = page.locator(`tr[data-client="${PHONE}"]`);
  await until('the client and its flow', async () => {
    if (flow.exitCode !== null) flow = lab.downloadOnPhone();
    return (await row.count()) > 0 && /[1-9].* [kM]bit/.test(await row.innerText());
  });
  assert.match(await row.innerText(), /lan0/);
  await row.getByRole('link', { name: `of ${PHONE}` }).click();
  const flows = page.locator('main[data-view="flows"] .rows .tr:not([hidden])');
  await flows.first().waitFor();
  assert.ok((await flows.locator('.c-app').allTextContents()).every((text) => text === PHONE));
  await flows.first().click();
  await page.locator('dialog').getByText('gave it lab').waitFor();
  flow.kill();
  assert.deepEqual(page.problems, []);
  await page.context().close();
});

test('sees the virtual interface, and the flow that passes it', { skip }, async () => {
  const page = await openPage(browser, lab.url);
  const card = page.getByRole('article', { name: 'Virtual interface braid0' });
  await card.getByText('Up', { exact: true }).waitFor({ timeout: 60_000 });
  const flow = lab.download('--interface', 'braid0');
  await until('its rate', async () => /[1-9][\d.]*\s*[kM]bit/.test(await card.innerText()));
  await card.getByRole('link', { name: 'through braid0' }).click();
  const row = page.locator('main[data-view="flows"] .rows .tr:not([hidden])').filter({ hasText: 'curl braid0' });
  await row.click();
  await page.locator('dialog').getByText('through the virtual interface braid0').waitFor();
  flow.kill();
  await until('the end of the flow', async () => (await row.count()) === 0);
  assert.deepEqual(page.problems, []);
  await page.context().close();
});

test('opens the address that braid ui prints, and may change settings', { skip }, async () => {
  const page = await openPage(browser, lab.page());
  await page.locator('.link[data-link="lab0"]').waitFor();
  assert.equal(new URL(page.url()).hash, '', 'the ticket is removed from the address');
  await page.reload();
  await go(page, 'settings');
  await page.getByText('Turn by turn').click();
  await page.getByRole('region', { name: 'Scheduler' }).getByRole('button', { name: 'Preview…' }).click();
  await apply(page);
  await page.locator('.facts').getByText('round-robin').waitFor();
  assert.match(readFileSync(lab.config, 'utf8'), /scheduler = "round-robin"/);
  assert.deepEqual(page.problems, []);
  await page.context().close();
});

test('opens the page of a network controller at the address that braid net ui prints', { skip }, async () => {
  const page = await openPage(browser, await lab.network());
  await page.getByText('No switch yet').waitFor();
  await page.getByText(/Connect switches to 127\.0\.0\.1:[1-9]/).waitFor();
  assert.equal(new URL(page.url()).hash, '', 'the ticket is removed from the address');
  assert.doesNotMatch(await page.locator('.facts').textContent(), /read only/);
  assert.deepEqual(page.problems, []);
  await page.context().close();
});

test('a stranger cannot sign in', { skip }, async () => {
  const page = await openPage(browser, new URL('/', lab.page()).href);
  await page.getByLabel('Token').fill('guessed');
  await page.getByRole('button', { name: 'Sign in' }).click();
  await page.getByRole('alert').waitFor();
  assert.equal(await page.locator('.link').count(), 0);
  await page.context().close();
});

test('joins a relay', { skip }, async () => {
  const page = await openPage(browser, `${lab.url}/#/peers`);
  await page.getByLabel('Invitation').fill(lab.invitation());
  await page.getByLabel('Name', { exact: true }).fill('lab');
  await page.getByRole('button', { name: 'Join' }).click();
  await page.locator('[data-peer="lab"]').getByText('Good').nth(2).waitFor({ timeout: 60_000 });
  assert.deepEqual(page.problems, []);
  await page.context().close();
});

test('a cut link causes an event', { skip }, async () => {
  const flows = Array.from({ length: 6 }, () => lab.download());
  const page = await openPage(browser, lab.url);
  await page.locator('.link[data-link="lab1"]').getByText('Up', { exact: true }).waitFor();
  lab.cut('lab1');
  await page
    .locator('.link[data-link="lab1"]')
    .getByText(/^(Down|Dead)$/)
    .waitFor({ timeout: 60_000 });
  await go(page, 'events');
  await page.locator('.note-text').filter({ hasText: 'lab1' }).first().waitFor();
  flows.forEach((flow) => flow.kill());
  assert.deepEqual(page.problems, []);
  await page.context().close();
});
