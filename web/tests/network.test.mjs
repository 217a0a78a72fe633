// The page of a network's controller, in a real browser against the mock.

import assert from 'node:assert/strict';
import { after, before, describe, test } from 'node:test';
import { examine, launch, visit as visitMock } from './browser.mjs';
import { startMock } from './mock.mjs';
import { CLIENT, OTHER_WIFI, PLAIN, WIFI, crowd, place, ring } from './mock-network.mjs';

let browser;
before(async () => {
  browser = await launch();
});
after(() => browser.close());

/** Visits the page of a controller with this network. */
const visit = (options, body) => visitMock(browser, { network: ring(), ...options }, body);

const row = (page, key) => page.locator(`tr[data-row="${key}"]`);
/** Where the parts of the drawing are, by their names. */
const places = (page, kind) => page.locator(`.net [data-${kind}]`).evaluateAll((all, name) => Object.fromEntries(all.map((node) => [node.dataset[name], node.style.transform])), kind);

const change = async (page, host) => {
  await page.getByRole('button', { name: `Change host ${host}` }).click();
  return page.getByRole('dialog', { name: `Host ${host}` });
};

const SIZES = [
  [1440, 900],
  [360, 740],
];

describe('user actions', () => {
  test('sees switches, links, access points with their load, and hosts at their ports', () =>
    visit({}, async (page) => {
      await page.locator('[data-switch]').nth(2).waitFor();
      assert.equal(await page.title(), 'Network · Braid');
      assert.deepEqual(Object.keys(await places(page, 'switch')), ['1', '2', '3']);
      assert.equal(await page.locator('.net [data-link]').count(), 3);
      const drawing = page.getByRole('img', { name: 'Drawing of 3 switches, 3 links, 3 access points, 3 hosts' });
      const access = drawing.locator('[data-place="0000000000000001:4"]');
      assert.match(await access.textContent(), new RegExp(`${WIFI}wifi · ch 36 · port 490 %`));
      assert.equal(await access.locator('.net-load').getAttribute('data-tone'), 'warn', 'it is busy');
      assert.match(await drawing.locator('[data-place="0000000000000003:4"]').textContent(), /cellular · port 4–/, 'an unknown load is a dash');
      assert.match(await drawing.locator('[data-place="0000000000000002:3"]').textContent(), /s2-hostport 3/);
      assert.equal(await drawing.locator('[data-place="0000000000000002:2"]').count(), 0, 'ports without hosts are not drawn');
      assert.match(await drawing.locator(`[data-host="${CLIENT}"]`).textContent(), /10\.0\.0\.10 · 02:00:5e:10:00:0a/);
      assert.equal(await drawing.locator('.net-client').count(), 1);
      assert.equal(await drawing.locator('.net-active').count(), 3, 'a line to the active place of each host');
      assert.match(await row(page, '0000000000000002').innerText(), /2\s+Live\s+192\.0\.2\.2:40000\s+4 of 4\s+12\s+1:2 to 2:1, 2:2 to 3:1/);
      assert.match(await row(page, WIFI).innerText(), /1:4\s+wifi\s+36\s+Up\s+1\s+1\.00 Mbit\/s\s+18\.0 Mbit\/s\s+20\.0 Mbit\/s\s+0 bit\/s from, 2\.00 Mbit\/s to\s+90 %\s+Busy/);
      assert.match(await row(page, CLIENT).innerText(), /fd00::a, 10\.0\.0\.10\s+1:4\s+1:4\s+hoolock\s+yes/);
      assert.match(await row(page, PLAIN).innerText(), /10\.0\.0\.11\s+2:3\s+2:3\s+hard\s+no/);
      await page.locator('.facts').getByText('3 switches · 3 links · 3 access points · 3 hosts · all entries are in place').waitFor();
    }));

  test('sees a host move, and nothing else', () =>
    visit({}, async (page, mock) => {
      const host = page.locator(`[data-host="${CLIENT}"]`);
      await host.waitFor();
      const [before, others] = [await host.evaluate((node) => node.style.transform), await places(page, 'switch')];
      await host.evaluate((node) => {
        node.id = 'same';
      });
      // Over both access points for a while, as with n-cast.
      const client = mock.network.hosts[0];
      client.attachments = [place(1, 4), place(2, 4)];
      client.active = [place(1, 4), place(2, 4)];
      await page.waitForFunction(() => document.querySelectorAll('.net-active').length === 4);
      assert.equal(await host.evaluate((node) => node.style.transform), before);
      client.active = [place(2, 4)];
      await page.waitForFunction((was) => document.querySelector('#same').style.transform !== was, before);
      assert.equal(await page.locator('.net-active').count(), 3);
      assert.equal(await page.locator('.net-idle').count(), 1, 'it is still attached at the other one');
      assert.deepEqual(await places(page, 'switch'), others);
      const [at, beside] = [await host.evaluate((node) => node.style.transform), (await places(page, 'place'))['0000000000000002:4']];
      assert.equal(at.split(', ')[1], beside.split(', ')[1], 'it is beside its access point');
      await row(page, CLIENT).getByText('1:4, 2:4').waitFor();
    }));

  test('sees that a link breaks and comes back', () =>
    visit({}, async (page, mock) => {
      await page.locator('.net [data-link]').nth(2).waitFor();
      const before = await places(page, 'switch');
      const [link] = mock.network.links.splice(1, 1);
      await page.locator('.net-lost[data-link="2:2 to 3:1"]').waitFor({ state: 'attached' });
      await row(page, '0000000000000003').getByText('2:2 to 3:1').waitFor();
      await page.getByRole('img', { name: 'Lost: 2:2 to 3:1' }).waitFor();
      assert.equal(await page.locator('#announce').textContent(), 'Link 2:2 to 3:1 is lost.');
      assert.deepEqual(await places(page, 'switch'), before);
      mock.network.links.push(link);
      await page.locator('.net-lost').waitFor({ state: 'detached' });
      assert.equal(await page.locator('.net-line[data-link]').count(), 3);
    }));

  test('a lost link is forgotten when its port gets another cable', () =>
    visit({}, async (page, mock) => {
      await page.locator('.net [data-link]').nth(2).waitFor();
      mock.network.links[1] = { one: place(2, 2), other: place(3, 3) };
      await page.locator('[data-link="2:2 to 3:3"]').waitFor({ state: 'attached' });
      assert.equal(await page.locator('.net-lost').count(), 0);
    }));

  test('sees a switch that is away, an access point that is down, and ports that are down', () =>
    visit({}, async (page, mock) => {
      await page.locator('[data-switch="2"]').getByText('Live').waitFor();
      mock.network.switches[1].state = 'away';
      mock.network.switches[2].ports[2].up = false;
      mock.network.accesses[1].serves = false;
      mock.network.converged = false;
      await page.locator('[data-switch="2"]').getByText('Away').waitFor();
      await page.locator('[data-place="0000000000000002:4"]').getByText('down').waitFor();
      await row(page, OTHER_WIFI).getByText('Down', { exact: true }).waitFor();
      await row(page, '0000000000000003').getByText('3 s3-host').waitFor();
      await page.locator('.facts').getByText('entries are changing').waitFor();
      assert.equal(await page.locator('#announce').textContent(), 'Switch 2 is away.');
    }));

  test('chooses the mobility manager of a host', () =>
    visit({}, async (page, mock) => {
      const dialog = await change(page, PLAIN);
      await dialog.getByText('This host does not run Braid').waitFor();
      assert.equal(await dialog.getByLabel('Access point').count(), 0);
      const manager = dialog.getByLabel('Mobility manager');
      assert.equal(await manager.inputValue(), 'hard');
      await manager.selectOption('n-cast');
      await dialog.getByRole('button', { name: 'Choose' }).click();
      await page.locator('.toast').getByText(`${PLAIN} has the mobility manager n-cast`).waitFor();
      assert.deepEqual(mock.posted, [['/v1/network', { host: PLAIN, manager: 'n-cast' }]]);
      await row(page, PLAIN).getByText('n-cast').waitFor();
    }));

  test('asks a client to go to an access point', () =>
    visit({}, async (page, mock) => {
      const dialog = await change(page, CLIENT);
      const to = dialog.getByLabel('Access point');
      const offered = await to.locator('option').allTextContents();
      assert.deepEqual(offered, [`${OTHER_WIFI} (wifi at 2:4, 10 % in use)`, '02:aa:00:00:00:03 (cellular at 3:4)'], 'not the one where it is');
      await to.selectOption(OTHER_WIFI);
      await dialog.getByRole('button', { name: 'Ask it to go there' }).click();
      await row(page, CLIENT).getByText('2:4').first().waitFor();
      assert.deepEqual(mock.posted, [['/v1/network', { host: CLIENT, to: OTHER_WIFI }]]);
    }));

  test('sees why a change is refused', () =>
    visit({ expected: /409/ }, async (page, mock) => {
      const dialog = await change(page, CLIENT);
      mock.network.accesses[1].serves = false;
      await dialog.getByLabel('Access point').selectOption(OTHER_WIFI);
      await dialog.getByRole('button', { name: 'Ask it to go there' }).click();
      await dialog.getByRole('alert').getByText('a host cannot be attached there').waitFor();
    }));

  test('filters hosts', () =>
    visit({}, async (page) => {
      await row(page, PLAIN).waitFor();
      await page.getByLabel('Filter hosts').fill('hoolock 10.0.0');
      await page.getByText('1 host', { exact: true }).waitFor();
      assert.equal(await row(page, PLAIN).count(), 0);
      await row(page, CLIENT).waitFor();
      await page.getByLabel('Filter hosts').fill('no such host');
      await page.getByText('No host matches the filter').waitFor();
    }));

  test('sees where switches connect while there is none', () =>
    visit({ network: { ...ring(), switches: [], links: [], accesses: [], hosts: [] } }, async (page) => {
      await page.getByText('No switch yet').waitFor();
      await page.getByText('Connect switches to 192.0.2.1:6653').waitFor();
      assert.equal(await page.locator('.net').isVisible(), false);
    }));
});

describe('the drawing', () => {
  test('follows from ids alone', () =>
    visit({}, async (page) => {
      const [one, other] = await page.evaluate(
        async ([given, turned]) => {
          const { layout } = await import('/assets/network-layout.js');
          const { linkMemory } = await import('/assets/network-names.js');
          return [given, turned].map((network) => layout(network, linkMemory()(network.links, 0))).map(({ switches, places, hosts, ways, arcs }) => ({
            at: [switches, places, hosts].map((all) => all.map(({ key, y }) => `${key} ${y}`)),
            paths: [ways, arcs].map((all) => all.map(({ key, path }) => `${key} ${path}`)),
          }));
        },
        [ring(), Object.fromEntries(Object.entries(ring()).map(([name, value]) => [name, Array.isArray(value) ? value.toReversed() : value]))],
      );
      assert.deepEqual(one, other);
    }));

  test('a lost link is shown for five minutes', () =>
    visit({}, async (page) => {
      const lost = await page.evaluate(async (network) => {
        const { linkMemory } = await import('/assets/network-names.js');
        const remember = linkMemory();
        remember(network.links, 0);
        return [1000, 300_000, 302_000].map((now) => remember([], now).filter((link) => link.lost).length);
      }, ring());
      assert.deepEqual(lost, [3, 3, 0]);
    }));

  for (const [width, height] of SIZES) {
    test(`1,000 switches and 4,000 hosts are bounded, and make no page too wide, at ${width} px`, () =>
      visit({ network: crowd(1000, 4000), width, height }, async (page) => {
        await page.getByText('40 of 1,000 switches and 160 of 4,000 hosts are drawn').waitFor();
        assert.equal(await page.locator('[data-switch]').count(), 40);
        await page.getByText('300 of 4,000: filter to see others').waitFor();
        assert.equal(await page.locator('tr[data-row]').count(), 603);
        const wide = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
        assert.ok(wide <= 0, `${wide} px too wide`);
        await page.getByLabel('Filter hosts').fill('02:00:00:00:0f:9f');
        await row(page, '02:00:00:00:0f:9f').waitFor();
      }));
  }

  test('the longest ids and addresses fit, and a cell names only some of many addresses', () => {
    const network = ring();
    const long = 'ffffffffffffffff';
    network.switches[2].datapath = long;
    network.links = [];
    network.accesses[2].place = { datapath: long, port: 4 };
    const host = network.hosts[2];
    host.attachments = host.active = [{ datapath: long, port: 4 }];
    host.addresses = ['255.255.255.255', ...Array.from({ length: 30 }, (_, at) => `fd00::${at + 1}`)];
    return visit({ network }, async (page) => {
      const box = page.locator(`[data-switch="${long}"]`);
      await box.waitFor();
      const over = await box.evaluate((node) => node.querySelector('text').getComputedTextLength() + 24 - node.querySelector('rect').width.baseVal.value);
      assert.ok(over <= 0, `the id is ${over} too wide`);
      const [end, width] = await page.locator('.net').evaluate((node) => {
        const { x, width: wide } = node.viewBox.baseVal;
        return [Math.max(...[...node.querySelectorAll('[data-host] text')].map((text) => 688 + 14 + text.getComputedTextLength())), x + wide];
      });
      assert.ok(end <= width, `a host ends at ${end} of ${width}`);
      await row(page, host.mac).getByText('255.255.255.255, fd00::1, fd00::2, fd00::3, fd00::4, fd00::5, 25 more').waitFor();
    });
  });

  test('a port with many hosts says how many more it has', () =>
    visit({ network: crowd(2, 30) }, async (page) => {
      await page.locator('[data-switch="1"]').waitFor();
      assert.equal(await page.locator('.net [data-host]').count(), 14);
      assert.equal(await page.getByText('and 8 other hosts').count(), 2);
    }));
});

describe('error handling', () => {
  test('hostile names of ports are shown as text', () => {
    const network = ring();
    const names = ['<img src=x onerror="document.title=\'run\'">', `a\u202eb${'x'.repeat(3000)}`, 'name'];
    network.switches.forEach((one, at) => {
      one.ports[2].name = names[at];
      one.ports[0].name = names[at];
      one.ports[0].up = false;
    });
    network.switches[0].peer = '<script>alert(1)</script>';
    network.hosts.push({ ...network.hosts[1], mac: '02:00:5e:10:00:0d', attachments: [place(1, 3)], active: [place(1, 3)] });
    network.hosts[1].attachments = [place(2, 3)];
    return visit({ network }, async (page) => {
      await page.locator('.net [data-place="0000000000000001:3"]').getByText('<img src=x onerror').waitFor();
      await row(page, '0000000000000001').getByText('<img src=x onerror="document.title').waitFor();
      await row(page, '0000000000000001').getByText('<script>alert(1)</script>').waitFor();
      assert.doesNotMatch(await page.locator('body').innerText(), /\u202e/, 'no name reverses what follows it');
      assert.equal(await page.locator('main img, main script').count(), 0);
      assert.equal(await page.title(), 'Network · Braid');
      const wide = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
      assert.ok(wide <= 0, `${wide} px too wide`);
    });
  });

  test('a read-only session cannot change anything', () =>
    visit({ readOnly: true }, async (page, mock) => {
      await page.locator('.facts').getByText('read only').waitFor();
      await page.getByRole('button', { name: `Change host ${CLIENT}` }).click();
      await page.locator('.toast.failed').getByText('This session is read-only').waitFor();
      assert.equal(await page.locator('dialog').count(), 0);
      assert.deepEqual(mock.posted, []);
    }));

  test('a lost connection is shown and re-established', () =>
    visit({ expected: /ERR_|Failed to load/ }, async (page, mock) => {
      await page.locator('.live[data-state="live"]').waitFor();
      await mock.stop();
      await page.getByText('The connection to Braid is lost').waitFor();
      await page.locator('[data-switch="1"]').waitFor();
      const again = await startMock({ port: mock.port, network: ring() });
      mock.stop = again.stop;
      await page.locator('.live[data-state="live"]').waitFor();
      await page.getByText('The connection to Braid is lost').waitFor({ state: 'hidden' });
    }));

  test('the token signs in and is removed from the address', () =>
    visit({ token: 'secret-1', path: '/#token=secret-1' }, async (page) => {
      await page.locator('[data-switch="1"]').waitFor();
      assert.equal(new URL(page.url()).hash, '');
    }));

  test('without a token the page asks for it, also when a session ends', () =>
    visit({ token: 'secret-1', expected: /401/ }, async (page, mock) => {
      await page.getByText('Run “braid net ui” on the machine itself').waitFor();
      await page.getByLabel('Token').fill('wrong');
      await page.getByRole('button', { name: 'Sign in' }).click();
      await page.getByText('That is not the token').waitFor();
      await page.getByLabel('Token').fill('secret-1');
      await page.getByRole('button', { name: 'Sign in' }).click();
      await page.locator('[data-switch="1"]').waitFor();
      mock.token = 'secret-2';
      await page.getByLabel('Token').waitFor();
      assert.equal(await page.locator('.live').getAttribute('data-state'), 'refused');
    }));

  test('a server without a network says so', () =>
    visit({ network: null, live: false, path: '/assets/network.html', expected: /404/ }, async (page) => {
      await page.getByText('No network', { exact: true }).waitFor();
    }));
});

describe('accessibility', () => {
  for (const [width, height] of SIZES) {
    for (const dark of [false, true]) {
      test(`axe finds no serious problem at ${width} px, ${dark ? 'dark' : 'light'}, and nothing is cut off`, () => {
        const network = ring();
        network.switches[2].state = 'settling';
        network.accesses[1].serves = false;
        return visit({ network, width, height, dark }, async (page) => {
          await page.locator('[data-switch="1"]').waitFor();
          await examine(page, 'the network');
          const wide = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
          assert.ok(wide <= 0, `${wide} px too wide`);
          const ends = await page.getByRole('button', { name: `Change host ${CLIENT}` }).evaluate((node) => node.getBoundingClientRect().right);
          assert.ok(ends <= width, `the button of a host ends at ${ends}`);
          await change(page, CLIENT);
          await examine(page, 'the dialog of a host');
        });
      });
    }
  }

  test('the page works with the keyboard alone', () =>
    visit({}, async (page, mock) => {
      await row(page, CLIENT).waitFor();
      await page.keyboard.press('Tab');
      assert.equal(await page.evaluate(() => document.activeElement.textContent), 'Skip to content');
      await page.keyboard.press('Enter');
      await page.waitForFunction(() => document.activeElement.id === 'main');
      await page.getByRole('button', { name: `Change host ${PLAIN}` }).focus();
      await page.keyboard.press('Enter');
      const manager = page.getByRole('dialog').getByLabel('Mobility manager');
      await manager.focus();
      await page.keyboard.press('ArrowDown');
      await page.keyboard.press('Tab');
      await page.keyboard.press('Enter');
      await page.locator('.toast').waitFor();
      assert.equal(mock.posted[0][1].manager, 'hoolock');
      // The focus survives the next answers.
      mock.network.hosts.splice(0, 1);
      await row(page, CLIENT).waitFor({ state: 'detached' });
      assert.equal(await page.evaluate(() => document.activeElement.getAttribute('aria-label')), `Change host ${PLAIN}`);
    }));

  test('colours follow the system', () =>
    visit({ dark: true }, async (page) => {
      await page.locator('[data-switch="1"]').waitFor();
      const fill = () => page.locator('.net-box').first().evaluate((node) => getComputedStyle(node).fill);
      const dark = await fill();
      await page.locator('.theme').click();
      assert.notEqual(await fill(), dark);
    }));
});
