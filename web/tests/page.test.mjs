// User actions on the page, in a real browser against the mock.

import assert from 'node:assert/strict';
import { gzipSync } from 'node:zlib';
import { readFile, readdir } from 'node:fs/promises';
import { after, before, describe, test } from 'node:test';
import { join } from 'node:path';
import { examine, launch, openPage, visit as visitMock } from './browser.mjs';
import { startMock } from './mock.mjs';

const WEB = join(import.meta.dirname, '..');
/** The names in a `fn name(self)` of the daemon: the page must offer them all. */
const namesIn = async (file) => {
  const text = await readFile(join(WEB, '..', file), 'utf8');
  const body = text.match(/pub const fn name\(self\)[^]*?\n    }\n/)[0];
  return [...body.matchAll(/=> "([a-z-]+)"/g)].map(([, name]) => name);
};
const SCHEDULERS = await namesIn('crates/decide/src/policy.rs');
const BOND_SCHEDULERS = await namesIn('crates/decide/src/policy/bond.rs');
/** An ad-hoc device with two radios and two neighbours. */
function adhocDevice() {
  const radio = (name, up) => ({ name, mac: null, up, reason: up ? null : 'it is off', priority: 0, technology: null, translates: false, neighbours: 1 });
  const pair = (mac, name, share) => ({ mac, radio: name, at: null, braid: true, state: 'up', last_heard_ms: 300, rtt_us: 1200, loss: 0.05, share });
  const [one, other] = ['02:00:00:00:00:02', '02:00:00:00:00:03'];
  return {
    ...{ name: 'vi0', mac: '02:00:00:00:00:01', mtu: 1500, authenticated: false, by_frame: false, hysteresis_ms: 1000, expiry_ms: 10_000 },
    ...{ power_saving: true, saving_power: false, radios: [radio('wlan0', true), radio('eth0', false)] },
    neighbours: [pair(one, 'wlan0', 0.75), pair(one, 'eth0', 0.25), pair(other, 'wlan0', 1)],
    counts: { duplicates: 12, own: 0, storms: 0, flooded: 0, foreign: 0, no_radio: 0 },
    warnings: ['<b>eth0</b> and wlan0 are in one network'],
  };
}

const VIEWS = ['now', 'flows', 'apps', 'clients', 'adhoc', 'peers', 'events', 'gains', 'settings'];

let browser;
before(async () => {
  browser = await launch();
});
after(() => browser.close());

const visit = (options, body) => visitMock(browser, options, body);

const go = async (page, view) => {
  await page.locator(`#nav a[data-view="${view}"]`).click();
  await page.locator(`main[data-view="${view}"]`).waitFor();
};

const apply = (page) => page.getByRole('button', { name: 'Apply', exact: true }).click();

describe('user actions', () => {
  test('sees three links and live flows', () =>
    visit({}, async (page) => {
      await page.locator('.link').nth(2).waitFor();
      assert.deepEqual(await page.locator('.link h3').allTextContents(), ['eth0', 'wlan0', 'wwan0']);
      assert.match(await page.locator('.link').first().innerText(), /Mbit\/s[\s\S]*of 48\.0 Mbit\/s[\s\S]*11\.8 ms/);
      const total = page.locator('.total .figure').first();
      const first = await total.textContent();
      await page.waitForFunction((text) => document.querySelector('.total .figure').textContent !== text, first);
      await go(page, 'flows');
      await page.locator('.rows .tr:not([hidden])').first().waitFor();
      await page.getByLabel('Filter flows').fill('firefox wlan0');
      await page.waitForFunction(() => /^\d+ of 42 flows$/.test(document.querySelector('.said').textContent));
      const rows = await page.locator('.rows .tr:not([hidden])').allInnerTexts();
      assert.ok(rows.length > 0 && rows.every((row) => /firefox[\s\S]*wlan0/.test(row)), rows.join());
    }));

  for (const [width, height] of [
    [1440, 900],
    [360, 740],
  ]) {
    test(`rows of flows have no gaps, at ${width} px`, () =>
      visit({ live: false, width, height, path: '/#/flows' }, async (page) => {
        await page.locator('.rows .tr:not([hidden])').nth(5).waitFor();
        const boxes = await page
          .locator('.rows .tr:not([hidden])')
          .evaluateAll((rows) => rows.map((row) => row.getBoundingClientRect()).map(({ top, bottom }) => [top, bottom]));
        boxes.sort((a, b) => a[0] - b[0]);
        boxes.slice(1).forEach(([top], place) => assert.ok(Math.abs(top - boxes[place][1]) < 1, `row ${place + 1} at ${top}`));
        const [, low] = await page.locator('.head').evaluate((head) => [0, head.getBoundingClientRect().bottom]);
        assert.ok(Math.abs(boxes[0][0] - low) < 1, 'the first row is below the header');
      }));
  }

  test('sorts flows and shows why a flow has its link', () =>
    visit({ live: false }, async (page) => {
      await go(page, 'flows');
      await page.getByRole('button', { name: 'Application' }).click();
      const names = await page
        .locator('.rows .tr:not([hidden])')
        .evaluateAll((rows) =>
          rows
            .sort((a, b) => a.getAttribute('aria-rowindex') - b.getAttribute('aria-rowindex'))
            .map((row) => row.firstChild.textContent.toLowerCase()),
        );
      assert.deepEqual(names, [...names].sort());
      assert.equal(await page.locator('[role=columnheader]').first().getAttribute('aria-sort'), 'ascending');
      await page.locator('.rows .tr:not([hidden])').first().click();
      await page.getByText('eth0 would end it first').waitFor();
    }));

  test('says whether a flow has moved, waits, and is encrypted', () =>
    visit({ live: false }, async (page, mock) => {
      const flow = [...mock.flows.values()].find((one) => one.carry === 'direct' && one.protocol === 'tcp');
      Object.assign(flow, { moved_to: 'wwan0', late: true, accepted: true });
      await page.reload();
      await go(page, 'flows');
      await page.getByLabel('Filter flows').fill(flow.remote);
      const row = page.locator('.rows .tr:not([hidden])').first();
      await row.getByText('direct, moved').waitFor();
      await row.click();
      const dialog = page.getByRole('dialog');
      for (const text of ['its packets leave over wwan0', 'its packets wait until the link can take them', 'Braid adds none', 'Opened by']) {
        await dialog.getByText(text).waitFor();
      }
      await dialog.getByRole('button', { name: 'Move', exact: true }).waitFor();
    }));

  test('pins an application to a link, checks that new flows follow, and undoes it', () =>
    visit({}, async (page, mock) => {
      await go(page, 'apps');
      await page.getByRole('button', { name: 'Choose links for curl' }).click();
      await page.getByText('Only these').click();
      await page.locator('.checks').getByText('wwan0').click();
      await page.getByRole('button', { name: 'Preview…' }).click();
      await page.locator('.changes').getByText('/usr/bin/curl').waitFor();
      assert.match(
        (await page.locator('.line.added').allInnerTexts()).join('\n'),
        /match = \{ exe = "\/usr\/bin\/curl" \}[\s\S]*links = \["wwan0"\]/,
      );
      assert.equal(mock.config.past.length, 0, 'a preview changes nothing');
      await apply(page);
      await page.locator('[data-app="/usr/bin/curl"] .choice.own').getByText('Your rule: only wwan0').waitFor();
      const newest = mock.nextFlow;
      let flow;
      for (let tries = 0; tries < 500 && flow?.application !== '/usr/bin/curl'; tries += 1) flow = mock.openFlow();
      assert.ok(flow.id >= newest && flow.link === 'wwan0');
      await page.getByRole('button', { name: 'Choose links for curl' }).click();
      await page.locator('.checks').getByText('wwan0').click();
      await page.getByRole('button', { name: 'Preview…' }).click();
      assert.equal(
        await page
          .locator('.checks input')
          .first()
          .evaluate((box) => box.validationMessage),
        'Choose at least one link, or “Any link”.',
      );
      await page.keyboard.press('Escape');
      await page.getByRole('button', { name: 'Undo', exact: true }).click();
      await page.locator('[data-app="/usr/bin/curl"] .choice').getByText('Braid chooses').waitFor();
      assert.equal(mock.config.model.apps.length, 2);
    }));

  test('drags α and sees throughput and power while dragging', () =>
    visit({ live: false }, async (page, mock) => {
      await go(page, 'settings');
      const slider = page.getByLabel('Utility of throughput');
      const speed = page.locator('.tradeoff-facts dd').first();
      await page.waitForFunction(() => document.querySelector('.tradeoff-facts dd').textContent === '77.4 Mbit/s');
      await slider.scrollIntoViewIfNeeded();
      const box = await slider.boundingBox();
      await page.mouse.move(box.x + box.width * 0.6, box.y + box.height / 2);
      await page.mouse.down();
      await page.mouse.move(box.x + 4, box.y + box.height / 2, { steps: 8 });
      assert.equal(await speed.textContent(), '48.0 Mbit/s', 'shown while the button is still down');
      await page.mouse.up();
      assert.equal(mock.posted.length, 0, 'nothing was sent');
      await page.getByRole('region', { name: 'Speed against energy' }).getByRole('button', { name: 'Preview…' }).click();
      await page.locator('.changes').getByText('utility: 0.6 becomes 0').waitFor();
      await apply(page);
      await page.locator('.facts').getByText('operetta').waitFor();
      assert.equal(mock.config.model.utility, 0);
    }));

  test('changes the scheduler, a link and the order of rules', () =>
    visit({ live: false }, async (page, mock) => {
      await go(page, 'settings');
      await page.getByText('Turn by turn').click();
      await page.getByRole('region', { name: 'Scheduler' }).getByRole('button', { name: 'Preview…' }).click();
      await apply(page);
      await page.getByText('Applied: scheduler').waitFor();
      await page.getByRole('button', { name: 'Change link wlan0' }).click();
      await page.getByLabel('Role').selectOption('backup');
      await page.getByLabel('Monthly allowance').fill('5 GB');
      await page.getByRole('button', { name: 'Preview…' }).last().click();
      await apply(page);
      await page.locator('.link-setting[data-link="wlan0"]').getByText('Backup · 5 GB a month').waitFor();
      await page.getByRole('button', { name: 'Move rule 2 up' }).click();
      await apply(page);
      await page.locator('.rule').first().getByText('10.20.0.0/16').waitFor();
      assert.deepEqual(mock.config.model.links[1], { name: 'wlan0', role: 'backup', cap: '5 GB' });
      assert.equal(mock.config.model.scheduler, 'round-robin');
    }));

  test('offers every scheduler, and chooses one of the papers’', () =>
    visit({ live: false }, async (page, mock) => {
      await go(page, 'settings');
      const offered = await page.locator('.schedulers code').allTextContents();
      assert.deepEqual(offered.toSorted(), SCHEDULERS.toSorted());
      await page.getByText('Least makespan', { exact: true }).click();
      await page.getByRole('region', { name: 'Scheduler' }).getByRole('button', { name: 'Preview…' }).click();
      await apply(page);
      await page.locator('.facts').getByText('least-makespan').waitFor();
      assert.equal(mock.config.model.scheduler, 'least-makespan');
    }));

  test('says which hosts are asked and how capacities are measured', () =>
    visit({ live: false }, async (page) => {
      await go(page, 'settings');
      const card = page.getByRole('region', { name: 'Detection and measurement' });
      await card.getByText('files.example.org and hosts of the private networks 10.8.0.0/16').waitFor();
      await card.getByText('waits up to 300 ms').waitFor();
      await card.getByText('from ordinary transfers only').waitFor();
    }));

  test('sees no clients without a gateway', () =>
    visit({ live: false }, async (page) => {
      await go(page, 'settings');
      assert.equal(await page.locator('#nav a[data-view="clients"]').isVisible(), false);
    }));

  test('sees the clients of the gateway and their flows, and makes a rule for one', () =>
    visit({ live: false, lan: ['br-lan'] }, async (page, mock) => {
      mock.config.model.apps = [{ match: { client: '192.168.7.0/24' }, links: ['eth0'] }];
      await page.reload();
      await go(page, 'clients');
      const television = page.locator('tr[data-client="192.168.7.20"]');
      assert.match(await television.innerText(), /television[\s\S]*02:00:00:00:00:20[\s\S]*br-lan[\s\S]*12\.0 Mbit\/s/);
      await television.getByRole('button', { name: 'Choose links for television' }).click();
      const dialog = page.getByRole('dialog', { name: 'television' });
      await dialog.getByRole('radio', { name: 'Only these' }).check();
      await dialog.getByRole('checkbox', { name: 'wlan0' }).check();
      await dialog.getByRole('button', { name: 'Preview…' }).click();
      await apply(page);
      await television.getByText('only wlan0', { exact: true }).waitFor();
      await page.locator('tr[data-client="192.168.7.21"]').getByText('only eth0 (rule 2)').waitFor();
      assert.deepEqual(mock.config.model.apps[0], { match: { client: '02:00:00:00:00:20' }, links: ['wlan0'] });
      await page.getByLabel('Filter clients').fill('no such client');
      await page.getByText('No client matches the filter').waitFor();
      await page.getByLabel('Filter clients').fill('');
      await television.getByRole('link', { name: '2 flows of television' }).click();
      await page.locator('main[data-view="flows"] .rows .tr:not([hidden])').nth(1).waitFor();
      assert.deepEqual(await page.locator('.rows .tr:not([hidden]) .c-app').allTextContents(), ['television', 'television']);
      // A client is also an application, with the name and the rule that it has as a client.
      await go(page, 'apps');
      const app = page.locator('[data-app="192.168.7.20"]');
      await app.getByRole('heading', { name: 'television' }).waitFor();
      await app.getByText('Client 192.168.7.20').waitFor();
      await app.getByText('Your rule: only wlan0').waitFor();
      await go(page, 'flows');
      // A part of an address finds all that contain it.
      await page.getByLabel('Filter flows').fill('192.168.7.20');
      await page.waitForFunction(() => document.querySelector('.said').textContent.startsWith('3 of '));
    }));

  test('sees which neighbour is reached over which radio', () =>
    visit({ live: false, adhoc: adhocDevice() }, async (page) => {
      await go(page, 'adhoc');
      const drawing = page.getByRole('region', { name: 'Who is reached over which radio' });
      await drawing.getByText('vi0 · 02:00:00:00:00:01').waitFor();
      await drawing.getByText('2 neighbours over 2 radios').waitFor();
      assert.equal(await drawing.locator('svg path').count(), 5, 'a line to each radio, and one for each pair');
      const row = page.locator('[data-neighbour="02:00:00:00:00:02 wlan0"]');
      assert.match(await row.innerText(), /wlan0\s+up\s+75 %\s+1\.20 ms\s+5 %/);
      await page.getByText('<b>eth0</b> and wlan0 are in one network').waitFor();
    }));

  test('sees no radios without an ad-hoc device', () =>
    visit({ live: false }, async (page) => {
      assert.equal(await page.locator('#nav a[data-view="adhoc"]').isVisible(), false);
      await page.evaluate(() => {
        location.hash = '#/adhoc';
      });
      await page.getByText('No ad-hoc device').waitFor();
    }));

  test('sees the virtual interface, and which flows pass it', () =>
    visit({ live: false, own: {} }, async (page) => {
      const card = page.getByRole('article', { name: 'Virtual interface braid0' });
      assert.match(await card.innerText(), /braid0[\s\S]*Up[\s\S]*4\.20\s*Mbit\/s[\s\S]*310\s*kbit\/s[\s\S]*10\.99\.0\.1, fd99::1/);
      await card.getByRole('link', { name: '2 flows through braid0' }).click();
      const rows = page.locator('main[data-view="flows"] .rows .tr:not([hidden])');
      await rows.nth(1).waitFor();
      assert.deepEqual((await rows.locator('.c-app').allTextContents()).toSorted(), ['curl braid0', 'zoom braid0']);
      await rows.first().click();
      await page.getByRole('dialog').getByText('the virtual interface braid0').waitFor();
    }));

  test('sees why the virtual interface does not work, and nothing of it without one', () =>
    visit({ live: false, own: { reason: 'there is another device braid0; give the virtual interface another name ([virtual] name)' } }, async (page, mock) => {
      const card = page.getByRole('article', { name: 'Virtual interface braid0' });
      await card.getByText('Down', { exact: true }).waitFor();
      await card.getByText('there is another device braid0').waitFor();
      assert.match(await card.locator('.gauge').first().innerText(), /–/, 'an unknown rate is not 0');
      mock.own = null;
      await card.waitFor({ state: 'detached' });
      assert.equal(await page.getByText('Virtual interface').isVisible(), false);
    }));

  test('lets nothing leave but through the relay: everything, or what a rule matches', () =>
    visit({ live: false }, async (page, mock) => {
      await go(page, 'settings');
      const card = page.getByRole('region', { name: 'Everything over all links' });
      const press = async () => {
        await card.getByRole('button', { name: 'Preview…' }).click();
        await apply(page);
        await card.locator('button[disabled]').waitFor();
      };
      const only = card.getByLabel('Nothing but through the relay');
      assert.equal(await only.isVisible(), false, 'it means nothing unless everything is bonded');
      await card.getByLabel('Bond everything').check();
      await only.check();
      await press();
      assert.deepEqual([mock.config.model.carry, mock.config.model.fallback], ['bond', 'none']);
      await only.uncheck();
      await press();
      assert.deepEqual([mock.config.model.carry, mock.config.model.fallback], ['bond', undefined]);
      await only.check();
      await press();
      await card.getByLabel('Bond everything').uncheck();
      await press();
      assert.deepEqual([mock.config.model.carry, mock.config.model.fallback], [undefined, undefined]);
      const dialog = page.getByRole('dialog', { name: 'Rule' });
      const change = async (carry, fallback) => {
        await page.getByRole('button', { name: 'Edit rule 1' }).click();
        await dialog.getByLabel('Carried').selectOption(carry);
        const field = dialog.getByLabel('While no relay takes them');
        assert.equal(await field.isVisible(), fallback !== null);
        if (fallback !== null) await field.selectOption(fallback);
        await dialog.getByRole('button', { name: 'Preview…' }).click();
        await apply(page);
        await page.getByRole('dialog').waitFor({ state: 'detached' });
      };
      await change('bond', 'none');
      await page.locator('.rule').first().getByText('or not at all').waitFor();
      assert.equal(mock.config.model.apps[0].fallback, 'none');
      await change('direct', null);
      assert.equal(mock.config.model.apps[0].fallback, undefined, 'it means nothing without a relay');
    }));

  test('bonds everything, and chooses the relay if several are joined', () =>
    visit({ live: false }, async (page, mock) => {
      await go(page, 'settings');
      const card = page.getByRole('region', { name: 'Everything over all links' });
      const all = card.getByLabel('Bond everything');
      const press = async () => {
        await card.getByRole('button', { name: 'Preview…' }).click();
        await apply(page);
        await card.locator('button[disabled]').waitFor();
      };
      await all.check();
      assert.equal(await card.getByLabel('Relay', { exact: true }).isVisible(), false);
      await press();
      assert.deepEqual([mock.config.model.carry, mock.config.model.relay], ['bond', undefined]);
      mock.join({ line: 'braid1-x', name: 'office' });
      await card.getByLabel('Relay', { exact: true }).selectOption('office');
      await press();
      assert.deepEqual([mock.config.model.carry, mock.config.model.relay], ['bond', 'office']);
      await all.uncheck();
      await press();
      assert.deepEqual([mock.config.model.carry, mock.config.model.relay], [undefined, undefined]);
    }));

  test('changes the scheduler of bonds and its copies', () =>
    visit({ live: false }, async (page, mock) => {
      await go(page, 'settings');
      const card = page.getByRole('region', { name: 'Bonds' });
      const choose = async (value) => {
        await card.getByLabel('Scheduler of bonds').selectOption(value);
        if (value === 'redundant') await card.getByLabel('Copies').fill('3');
        await card.getByRole('button', { name: 'Preview…' }).click();
        await apply(page);
        await card.locator('button[disabled]').waitFor();
      };
      const offered = await card.getByLabel('Scheduler of bonds').locator('option').evaluateAll((all) => all.map((one) => one.value));
      assert.deepEqual(offered.filter(Boolean).toSorted(), BOND_SCHEDULERS.toSorted());
      await choose('redundant');
      assert.deepEqual(mock.config.model.bond, { scheduler: 'redundant', copies: 3 });
      await choose('rtt-share');
      assert.deepEqual(mock.config.model.bond, { scheduler: 'rtt-share' });
      await choose('');
      assert.deepEqual(mock.config.model.bond, {});
    }));

  test('chooses a utility that steps at a battery level, and shows it again', () =>
    visit({ live: false }, async (page, mock) => {
      await go(page, 'settings');
      const card = page.getByRole('region', { name: 'Speed against energy' });
      await card.getByLabel('α follows').selectOption('step');
      await card.getByLabel('Battery level').fill('0.4');
      await card.getByLabel('α below it').fill('0.1');
      await card.getByRole('button', { name: 'Preview…' }).click();
      await apply(page);
      await page.locator('.facts').getByText('operetta').waitFor();
      assert.deepEqual(mock.config.model.utility, { threshold: 0.4, above: 1, below: 0.1 });
      await page.reload();
      await go(page, 'settings');
      await card.getByLabel('α below it').waitFor();
      assert.equal(await card.getByLabel('α follows').inputValue(), 'step');
      assert.equal(await card.getByLabel('Battery level').inputValue(), '0.4');
    }));

  test('writes, edits and removes a rule', () =>
    visit({ live: false }, async (page, mock) => {
      await go(page, 'settings');
      await page.getByRole('button', { name: 'Add a rule…' }).click();
      await page.getByLabel('Destination port').fill('25');
      await page.getByLabel('Class').selectOption('bulk');
      await page.locator('dialog').getByRole('button', { name: 'Preview…' }).click();
      await apply(page);
      await page.locator('.rule').nth(2).waitFor();
      assert.deepEqual(mock.config.model.apps[0], { match: { port: 25 }, class: 'bulk' });
      await page.getByRole('button', { name: 'Edit rule 1' }).click();
      await page.getByLabel('Class').selectOption('');
      await page.getByLabel('Carried').selectOption('bond');
      await page.locator('dialog').getByRole('button', { name: 'Preview…' }).click();
      await apply(page);
      await page.locator('.rule').first().getByText('over several links at once').waitFor();
      assert.deepEqual(mock.config.model.apps[0], { match: { port: 25 }, carry: 'bond' });
      await page.getByRole('button', { name: 'Edit rule 1' }).click();
      await page.getByRole('button', { name: 'Remove this rule…' }).click();
      await apply(page);
      await page.waitForFunction(() => document.querySelectorAll('.rule').length === 2);
    }));

  test('shows the live history of an application', () =>
    visit({}, async (page) => {
      const asked = page.waitForRequest((request) => request.url().includes('/v1/history/apps?resolution=1s'));
      await go(page, 'apps');
      await asked;
      const card = page.locator('[data-app="/usr/bin/curl"]');
      await page.waitForFunction(() => document.querySelector('[data-app="/usr/bin/curl"] .spark-line').getAttribute('d').split('L').length > 100);
      await card.getByRole('button', { name: 'History of curl' }).click();
      const plot = card.locator('canvas');
      const newest = () => plot.getAttribute('aria-label');
      await page.waitForFunction(() => /curl receives [1-9]/.test(document.querySelector('.app-more canvas').ariaLabel));
      const first = await newest();
      assert.doesNotMatch(first, /firefox|Others/);
      await page.waitForFunction((text) => document.querySelector('.app-more canvas').ariaLabel !== text, first);
      assert.match(await card.locator('.app-more').innerText(), /Learnt, by destination port[\s\S]*443/);
      const day = page.waitForRequest((request) => /history\/apps\?application=%2Fusr%2Fbin%2Fcurl&resolution=5m/.test(request.url()));
      await card.getByRole('button', { name: '24 h' }).click();
      await day;
      await card.getByRole('button', { name: 'History of curl' }).click();
      assert.equal(await plot.count(), 0);
    }));

  test('shows the throughput by program', () =>
    visit({}, async (page) => {
      await page.getByRole('button', { name: 'Programs', exact: true }).click();
      await page.locator('.names li').nth(4).waitFor();
      const names = await page.locator('.names li').allTextContents();
      assert.ok(names.includes('curl') && names.length <= 6, names.join());
      await page.waitForFunction(() => /curl receives/.test(document.querySelector('.plot').ariaLabel));
      assert.equal(await page.locator('.names [class*="link-"]').count(), 0, 'link colours are used only for links');
      await page.getByRole('button', { name: 'Links', exact: true }).click();
      await page.waitForFunction(() => /eth0 receives/.test(document.querySelector('.plot').ariaLabel));
      assert.ok(await page.locator('.names').isHidden());
    }));

  test('shows why a link has no path to a relay', () =>
    visit({ live: false }, async (page, mock) => {
      Object.assign(mock.peers[0].paths[0], { state: 'none', reason: 'it has no IPv4' });
      mock.peers[0].packets = true;
      mock.send('peers', { peers: mock.peers });
      await go(page, 'peers');
      await page.getByText('No path: it has no IPv4', { exact: true }).waitFor();
      await page.getByText('Also carries other protocols than TCP and UDP').waitFor();
    }));

  test('joins a relay with an invitation, and leaves it', () =>
    visit({ live: false, expected: /422/ }, async (page) => {
      await go(page, 'peers');
      await page.getByLabel('Invitation').fill('hello');
      await page.getByRole('button', { name: 'Join' }).click();
      await page.getByRole('alert').getByText('An invitation begins with').waitFor();
      await page.getByLabel('Invitation').fill('braid1-abcdef');
      await page.getByLabel('Name', { exact: true }).fill('boat');
      await page.getByRole('button', { name: 'Join' }).click();
      await page.locator('[data-peer="boat"] tbody tr').nth(2).waitFor();
      await page.locator('[data-peer="boat"]').getByRole('button', { name: 'Leave…' }).click();
      await page.locator('dialog').getByRole('button', { name: 'Leave' }).click();
      await page.locator('[data-peer="boat"]').waitFor({ state: 'detached' });
    }));

  test('shows that a link failed', () =>
    visit({}, async (page, mock) => {
      const card = page.locator('.link[data-link="wwan0"]');
      await card.getByText('Up', { exact: true }).waitFor();
      mock.kill('wwan0');
      await card.getByText('Dead').waitFor();
      assert.equal(
        await card.locator('.fact').filter({ hasText: 'Round trip' }).locator('dd').textContent(),
        '–',
        'an unknown value is not 0',
      );
      assert.match(await page.locator('#announce').textContent(), /wwan0 went dark; \d+ flows moved to eth0, 3 ended/);
      await go(page, 'events');
      await page.locator('.note.warning').getByText('wwan0 went dark').waitFor();
    }));
});

describe('error handling', () => {
  test('a rejected change shows the reason and changes nothing', () =>
    visit({ live: false, expected: /422/ }, async (page, mock) => {
      await go(page, 'settings');
      await page.getByRole('button', { name: 'Change link eth0' }).click();
      await page.getByLabel('Monthly allowance').fill('lots');
      await page.getByRole('button', { name: 'Preview…' }).last().click();
      await page.locator('.toast.failed').getByText('"lots" is not an amount of data').waitFor();
      assert.equal(mock.config.past.length, 0);
    }));

  test('a file that was changed elsewhere is not overwritten', () =>
    visit({ live: false, expected: /409/ }, async (page, mock) => {
      await go(page, 'settings');
      await page.getByRole('button', { name: 'Move rule 2 up' }).waitFor();
      mock.config.model.scheduler = 'handover';
      await page.getByRole('button', { name: 'Move rule 2 up' }).click();
      await page.locator('.toast.failed').getByText('changed elsewhere').waitFor();
      assert.equal(mock.config.model.apps[0].match.name, 'backup-tool');
    }));

  test('facts of the context are shown, set and cleared, and conditions of rules are shown', () =>
    visit({ live: false }, async (page, mock) => {
      mock.config.model.apps[0].when = { moving: true };
      await page.reload();
      await go(page, 'settings');
      await page.getByText('when moving = true (not now: moving is unknown)').waitFor();
      await page.locator('[data-fact="battery"]').waitFor();
      assert.equal(await page.getByRole('button', { name: 'Clear fact battery' }).count(), 0);
      await page.getByLabel('Fact', { exact: true }).fill('moving');
      await page.getByLabel('Value', { exact: true }).fill('true');
      await page.getByLabel('For minutes').fill('5');
      await page.getByRole('button', { name: 'Set', exact: true }).click();
      await page.locator('[data-fact="moving"]').getByText('set by a user').waitFor();
      assert.deepEqual(mock.posted.at(-1), ['/v1/context', { name: 'moving', value: 'true', for_ms: 300_000 }]);
      await page.getByRole('button', { name: 'Clear fact moving' }).click();
      await page.locator('[data-fact="moving"]').waitFor({ state: 'detached' });
      assert.deepEqual(mock.posted.at(-1), ['/v1/context', { name: 'moving', value: null }]);
    }));

  test('rules of programs are shown and removed', () =>
    visit({ live: false }, async (page, mock) => {
      await go(page, 'settings');
      await page.getByText('No facts are known.').or(page.locator('[data-fact="battery"]')).first().waitFor();
      assert.equal(await page.getByText('Rules of programs').isVisible(), false);
      const entry = { ...mock.config.policy().apps[0], matches: 'port = 5004', prefer: ['wlan0'], unmet: null, when: null };
      const reservation = { down_bps: 2_000_000, up_bps: null, link: 'wlan0', kept: true, reason: null };
      mock.programRules = [
        { name: 'call', process: 77, program: 'ffmpeg', remaining_ms: 65_000, entry, reservation },
        { name: 'other', process: null, program: null, remaining_ms: 5_000, entry: { ...entry, unmet: 'wlan0 is down' }, reservation: { ...reservation, kept: false, link: null, reason: 'no link has so much' } },
      ];
      await page.reload();
      await go(page, 'settings');
      const call = page.locator('[data-rule="call"]');
      await call.getByText('keeps 2.00 Mbit/s down free on wlan0').waitFor();
      await call.getByText('call, from ffmpeg (number 77), for 1 min 5 s more').waitFor();
      await page.locator('[data-rule="other"]').getByText('does not apply now: wlan0 is down').waitFor();
      await page.locator('[data-rule="other"]').getByText('cannot keep 2.00 Mbit/s down free: no link has so much').waitFor();
      await page.getByRole('button', { name: 'Remove rule call' }).click();
      await call.waitFor({ state: 'detached' });
      assert.deepEqual(mock.posted.at(-1), ['/v1/rules', { name: 'call', rule: null }]);
    }));

  test('a read-only session cannot change anything', () =>
    visit({ live: false, readOnly: true, lan: ['br-lan'], expected: /403/ }, async (page, mock) => {
      await go(page, 'settings');
      await page.getByText('This session is read-only.').waitFor();
      assert.equal(await page.getByRole('button', { name: 'Set', exact: true }).isDisabled(), true);
      await page.getByRole('button', { name: 'Change link eth0' }).click();
      await page.locator('.toast.failed').getByText('This session is read-only').waitFor();
      assert.equal(mock.posted.length, 0);
      await go(page, 'clients');
      await page.getByRole('button', { name: 'Choose links for television' }).first().click();
      await page.getByLabel('Class').selectOption('bulk');
      await page.locator('dialog').getByRole('button', { name: 'Preview…' }).click();
      await page.locator('.toast.failed').nth(1).getByText('This session is read-only').waitFor();
      assert.equal(mock.posted.length, 0);
      await page.keyboard.press('Escape');
      await go(page, 'peers');
      await page.locator('[data-peer="home"]').getByRole('button', { name: 'Leave…' }).click();
      await page.locator('dialog').getByRole('button', { name: 'Leave' }).click();
      await page.locator('.toast.failed').nth(2).getByText('This session may only read').waitFor();
      await page.getByLabel('Invitation').fill('braid1-abcdef');
      await page.getByRole('button', { name: 'Join' }).click();
      await page.getByRole('alert').getByText('This session may only read').waitFor();
      assert.deepEqual(
        mock.peers.map((peer) => peer.name),
        ['home'],
      );
    }));

  test('a lost connection is shown and re-established', () =>
    visit({ expected: /ERR_|Failed to load/ }, async (page, mock) => {
      await page.locator('.live[data-state="live"]').waitFor();
      await mock.stop();
      await page.getByText('The connection to Braid is lost').waitFor();
      assert.equal(await page.locator('.live').getAttribute('data-state'), 'lost');
      const again = await startMock({ port: mock.port });
      await page.locator('.live[data-state="live"]').waitFor();
      await page.getByText('The connection to Braid is lost').waitFor({ state: 'hidden' });
      mock.stop = again.stop;
    }));

  test('clients and the virtual interface stay as they were while the connection is lost, and are those of the daemon afterwards', () =>
    visit({ lan: ['br-lan'], own: {}, expected: /ERR_|Failed to load/ }, async (page, mock) => {
      await go(page, 'clients');
      await page.locator('tr[data-client="192.168.7.20"]').first().waitFor();
      await mock.stop();
      await page.getByText('The connection to Braid is lost').waitFor();
      assert.equal(await page.locator('tr[data-client]').count(), 3);
      // The same daemon with another configuration.
      const again = await startMock({ port: mock.port });
      mock.stop = again.stop;
      await page.locator('.live[data-state="live"]').waitFor();
      await page.getByText('No gateway').waitFor();
      await page.locator('#nav a[data-view="clients"]').waitFor({ state: 'hidden' });
      await go(page, 'now');
      assert.equal(await page.getByRole('article', { name: 'Virtual interface' }).count(), 0);
    }));

  test('the token signs in and is removed from the address', () =>
    visit({ live: false, token: 'secret-1', path: '/#token=secret-1' }, async (page) => {
      await page.locator('.link').first().waitFor();
      assert.equal(new URL(page.url()).hash, '');
    }));

  test('without a token the page asks for it', () =>
    visit({ live: false, token: 'secret-1', expected: /401/ }, async (page) => {
      await page.getByLabel('Token').fill('wrong');
      await page.getByRole('button', { name: 'Sign in' }).click();
      await page.getByText('That is not the token').waitFor();
      await page.getByLabel('Token').fill('secret-1');
      await page.getByRole('button', { name: 'Sign in' }).click();
      await page.locator('.link').first().waitFor();
    }));

  for (const [width, height] of [
    [1440, 900],
    [360, 740],
  ]) {
    test(`4,000 clients with hostile and long names are shown as text, filtered, and make no page too wide, at ${width} px`, () =>
      visit({ live: false, lan: ['br-lan'], crowd: 4000, width, height }, async (page) => {
        const fits = async (view) => {
          const wide = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
          assert.ok(wide <= 0, `${view} is ${wide} px too wide`);
        };
        await go(page, 'clients');
        await page.getByText('300 of 4,003: filter to see others').waitFor();
        assert.equal(await page.locator('tr[data-client]').count(), 300);
        assert.ok(await page.locator('tr[data-client] th').first().evaluate((cell) => cell.clientWidth <= 320), 'a long name is cut');
        await fits('clients');
        // It is far behind the busiest.
        await page.getByLabel('Filter clients').fill('10.7.0.2 <img');
        await page.locator('tr[data-client="10.7.0.2"]').getByText('<img src=x onerror=').waitFor();
        await page.getByLabel('Filter clients').fill('10.7.15.158');
        const row = page.locator('tr[data-client="10.7.15.158"]');
        await row.getByRole('link', { name: '1 flow of' }).click();
        await page.waitForFunction(() => document.querySelector('.said').textContent === '1 of 4,045 flows');
        await fits('flows');
        await page.locator('.rows .tr:not([hidden])').first().click();
        await page.locator('dialog').getByText('10.7.15.158, <img').waitFor();
        await page.locator('dialog').getByText('its packets take it').waitFor();
        await page.getByRole('button', { name: 'Choose links for this client…' }).click();
        await page.getByRole('dialog', { name: '<img src=x' }).waitFor();
        assert.doesNotMatch(await page.locator('body').innerText(), /\u202e/, 'no name reverses what follows it');
        assert.equal(await page.locator('main img, dialog img').count(), 0);
        assert.match(await page.title(), /Braid/);
      }));
  }

  test('hostile names are shown as text', () =>
    visit({ flows: 200 }, async (page, mock) => {
      mock.note('flow', 'warning', '<img src=x onerror="document.title=\'run\'"> ended');
      await go(page, 'flows');
      await page.getByLabel('Filter flows').fill('onerror');
      await page.locator('.rows .tr:not([hidden])').first().getByText('<img src=x onerror=alert(1)>').waitFor();
      await go(page, 'events');
      await page.locator('.note-text').getByText('<img src=x onerror="document.title').waitFor();
      assert.equal(await page.locator('main img, main script').count(), 0);
      for (const name of (await readdir(WEB)).filter((file) => file.endsWith('.js'))) {
        assert.doesNotMatch(await readFile(join(WEB, name), 'utf8'), /innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(/, name);
      }
    }));
});

describe('accessibility', () => {
  for (const [width, height] of [
    [1440, 900],
    [360, 740],
  ]) {
    for (const dark of [false, true]) {
      test(`axe finds no serious problem at ${width} px, ${dark ? 'dark' : 'light'}, and nothing is cut off`, () =>
        visit({ live: false, lan: ['br-lan'], own: {}, adhoc: adhocDevice(), width, height, dark }, async (page) => {
          for (const view of VIEWS) {
            await go(page, view);
            await examine(page, `${view}`);
            const wide = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
            assert.ok(wide <= 0, `${view} is ${wide} px too wide`);
          }
          await page.getByRole('button', { name: 'Edit rule 1' }).click();
          await examine(page, 'the dialog of a rule');
          await page.getByLabel('Class').selectOption('browser');
          await page.locator('dialog').getByRole('button', { name: 'Preview…' }).click();
          await page.locator('.changes').waitFor();
          await examine(page, 'the preview');
        }));
    }
  }

  test('the page works with the keyboard alone', () =>
    visit({ live: false }, async (page) => {
      await go(page, 'flows');
      await page.locator('.scroll').focus();
      for (const key of ['ArrowDown', 'ArrowDown', 'End', 'Home', 'ArrowDown']) await page.keyboard.press(key);
      const active = page.locator('.rows .tr.active');
      await active.waitFor();
      assert.equal(await active.getAttribute('aria-rowindex'), '3');
      assert.equal(await page.locator('.scroll').getAttribute('aria-activedescendant'), await active.getAttribute('id'));
      await page.keyboard.press('Enter');
      await page.locator('dialog[open]').waitFor();
      await page.keyboard.press('Escape');
      await page.locator('dialog').waitFor({ state: 'detached' });
      assert.ok(await page.evaluate(() => document.activeElement.classList.contains('scroll')), 'the focus is where it was');
      await go(page, 'now');
      await page.locator('.plot').focus();
      await page.keyboard.press('ArrowLeft');
      await page.locator('.tip').getByText('Total').waitFor();
    }));

  test('colours follow the system and the switch, from the first paint on', () =>
    visit({ live: false, dark: true }, async (page) => {
      const [DARK, LIGHT] = ['rgb(13, 17, 23)', 'rgb(245, 246, 248)'];
      const paper = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
      const becomes = (colour) => page.waitForFunction((wanted) => getComputedStyle(document.body).backgroundColor === wanted, colour);
      assert.equal(await paper(), DARK);
      await page.emulateMedia({ colorScheme: 'light' });
      await becomes(LIGHT);
      await page.emulateMedia({ colorScheme: 'dark' });
      await becomes(DARK);
      await page.locator('.theme').click();
      assert.equal(await paper(), LIGHT);
      await page.locator('.theme').click();
      await page.emulateMedia({ colorScheme: 'light' });
      // The colours before any module of the page has loaded: a choice takes precedence over the system.
      await page.route('**/app.js', (route) => route.abort());
      await page.reload();
      assert.equal(await paper(), DARK, 'and it stays');
      page.problems.length = 0;
    }));

  test('unknown values are a dash, and quantities have units', () =>
    visit({ live: false }, async (page) => {
      const said = await page.evaluate(async () => {
        const { rate, bytes, rtt, loss, watts, joules, duration } = await import('/assets/format.js');
        return [
          rate(null),
          bytes(undefined),
          rtt(null),
          loss(null),
          watts(null),
          joules(null),
          duration(null),
          rate(0),
          rate(999),
          rate(999_999),
          rate(12_345_678),
          bytes(1.5e9),
          rtt(11_840),
          rtt(42),
          rtt(250_000),
          loss(0.0061),
          watts(0.31),
          watts(2.5),
          duration(3_725_000),
        ];
      });
      assert.deepEqual(said, [
        '–',
        '–',
        '–',
        '–',
        '–',
        '–',
        '–',
        '0 bit/s',
        '999 bit/s',
        '1.00 Mbit/s',
        '12.3 Mbit/s',
        '1.50 GB',
        '11.8 ms',
        '42 µs',
        '250 ms',
        '0.61 %',
        '310 mW',
        '2.50 W',
        '1 h 2 min',
      ]);
    }));

  test('changing values cause no layout shift', () =>
    visit({}, async (page) => {
      await page.locator('.link').nth(2).waitFor();
      await page.evaluate(() => {
        window.jumps = 0;
        new PerformanceObserver((list) =>
          list.getEntries().forEach((entry) => {
            window.jumps += entry.value;
          }),
        ).observe({ type: 'layout-shift' });
      });
      await page.waitForTimeout(4_500);
      assert.ok((await page.evaluate(() => window.jumps)) < 0.01);
    }));
});

describe('size and speed', () => {
  for (const [document, most] of [
    ['index.html', 72_000],
    ['network.html', 32_000],
  ]) {
    test(`${document} is small, with all that it loads`, async () => {
      const files = await loaded(document);
      const sizes = await Promise.all(files.map(async (name) => gzipSync(await readFile(join(WEB, name))).length));
      const total = sizes.reduce((sum, size) => sum + size, 0);
      console.log(`${document}: ${total} bytes compressed in ${files.length} files`);
      assert.ok(total < most, `${total} bytes`);
    });
  }

  test('every file belongs to a page', async () => {
    const files = (await readdir(WEB)).filter((name) => /\.(html|js|css|svg)$/.test(name));
    const all = new Set([...(await loaded('index.html')), ...(await loaded('network.html'))]);
    assert.deepEqual(files.toSorted(), [...all].toSorted());
  });

  // The machine may be shared, so these timings are printed, not asserted.
  test('5,000 flows that all change every second are shown, and scrolled through', () =>
    visit({ flows: 5000 }, async (page, mock) => {
      await go(page, 'flows');
      await page.locator('.rows .tr:not([hidden])').first().waitFor();
      for (const flow of mock.flows.values()) flow.appetite = Math.max(flow.appetite, 0.03);
      const client = await page.context().newCDPSession(page);
      await client.send('Performance.enable');
      const still = await openPage(browser, 'about:blank');
      await still.evaluate(() => {
        const box = document.body.appendChild(document.createElement('div'));
        Object.assign(box.style, { height: '800px', overflow: 'auto' });
        box.className = 'scroll';
        for (let row = 0; row < 5000; row += 1) box.appendChild(document.createElement('div')).textContent = `row ${row} of plain text`;
      });
      const cases = [
        ['updates only', page, 0],
        ['updates and scrolling', page, 120],
        ['plain text, scrolling', still, 120],
      ];
      for (const [what, where, step] of cases) {
        await where.bringToFront();
        const begin = await worked(client);
        const { frames, seconds, late, longest } = await drawn(where, step);
        const end = await worked(client);
        const work = where === page ? `; main thread busy ${((end - begin) / seconds / 10).toFixed(0)} %` : '';
        console.log(
          `5,000 flows, ${what}: ${(frames / seconds).toFixed(1)} frames a second; from one to the next 99 % within ${late.toFixed(0)} ms, ` +
            `${longest.toFixed(0)} ms at most${work}`,
        );
        assert.ok(frames > 10);
      }
      await still.context().close();
      // The load was as intended: every flow was updated, and so were the visible rows.
      await page.bringToFront();
      const first = () => page.locator('.rows .tr:not([hidden])').first().innerText();
      const before = await first();
      await page.waitForFunction((text) => document.querySelector('.rows .tr:not([hidden])').innerText !== text, before);
      // Except for the flows that started since.
      assert.ok(mock.step().length > 4900);
      assert.ok((await page.locator('.rows .tr').count()) < 80, 'only rows in sight exist');
      assert.equal(await page.locator('.scroll').getAttribute('aria-rowcount'), '5001');
    }));
});

/** The files that a page loads, itself included. */
async function loaded(document) {
  const files = new Set([document]);
  for (const name of files) {
    const text = await readFile(join(WEB, name), 'utf8');
    for (const [, file] of text.matchAll(/(?:(?:src|href)="\/assets\/|from '\.\/)([a-z-]+\.[a-z]+)['"]/g)) files.add(file);
  }
  return [...files];
}

/** Processor time of the page's main thread, in milliseconds. */
async function worked(client) {
  const { metrics } = await client.send('Performance.getMetrics');
  return metrics.find(({ name }) => name === 'ThreadTime').value * 1000;
}

/** Frames in six seconds, and the intervals between them; `step` is the scroll distance of the rows in each frame. */
const drawn = (page, step) =>
  page.evaluate(
    (step) =>
      new Promise((resolve) => {
        const box = document.querySelector('.scroll');
        const times = [];
        const frame = (now) => {
          times.push(now);
          if (step) box.scrollTop += step;
          if (now - times[0] < 6000) return requestAnimationFrame(frame);
          const gaps = times.slice(1).map((time, place) => time - times[place]);
          gaps.sort((a, b) => a - b);
          return resolve({
            frames: gaps.length,
            seconds: (times.at(-1) - times[0]) / 1000,
            late: gaps[Math.floor(gaps.length * 0.99)],
            longest: gaps.at(-1),
          });
        };
        requestAnimationFrame(frame);
      }),
    step,
  );
