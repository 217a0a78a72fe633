// A mock controller's network: the shape of `GET /v1/network`, and the changes of `POST /v1/network`.

const datapath = (id) => id.toString(16).padStart(16, '0');
export const place = (id, port) => ({ datapath: datapath(id), port });
const port = (number, name = '', up = true, edge = true) => ({ number, name, up, edge });

export const CLIENT = '02:00:5e:10:00:0a';
export const PLAIN = '02:00:5e:10:00:0b';
const ACCESSES = ['02:aa:00:00:00:01', '02:aa:00:00:00:02', '02:aa:00:00:00:03'];
export const [WIFI, OTHER_WIFI, CELLULAR] = ACCESSES;

const UNRESERVED = { reservable_bps: 10e6, reserved_up_bps: 0, reserved_down_bps: 0, enforces_up: true, enforces_down: true };
const host = (mac, addresses, at, more = {}) => ({ mac, addresses, attachments: [at], active: [at], manager: 'hard', client: false, reservation: null, ...more });

/** Three switches in a ring, three access points, a client of Braid at one of them, and two other hosts. */
export function ring() {
  const access = (id, at, kind, channel, more) => ({ id, place: at, kind, channel, serves: true, capacity_bps: 20e6, rate_up_bps: null, rate_down_bps: null, ...UNRESERVED, ...more });
  return {
    listens: ['192.0.2.1:6653'],
    switches: [1, 2, 3].map((id) => ({
      datapath: datapath(id),
      peer: `192.0.2.${id}:40000`,
      state: 'live',
      entries: 10 + id,
      ports: [port(1, `s${id}-left`, true, false), port(2, `s${id}-right`, true, false), port(3, `s${id}-host`), port(4, `s${id}-ap`)],
    })),
    links: [
      [1, 2],
      [2, 3],
      [3, 1],
    ].map(([one, other]) => ({ one: place(one, 2), other: place(other, 1) })),
    accesses: [
      access(WIFI, place(1, 4), 'wifi', 36, { rate_up_bps: 1e6, rate_down_bps: 18e6, reserved_down_bps: 2e6 }),
      access(OTHER_WIFI, place(2, 4), 'wifi', 40, { rate_up_bps: 2e6, rate_down_bps: 1e6 }),
      access(CELLULAR, place(3, 4), 'cellular', null),
    ],
    hosts: [
      host(CLIENT, ['fd00::a', '10.0.0.10'], place(1, 4), { client: true, manager: 'hoolock' }),
      host(PLAIN, ['10.0.0.11'], place(2, 3)),
      host('02:00:5e:10:00:0c', [], place(3, 3)),
    ],
    managers: ['balance', 'hard', 'hoolock', 'n-cast', 'predict'],
    converged: true,
  };
}

/** Many switches in a line, each with hosts. */
export function crowd(switches, hosts) {
  return {
    ...ring(),
    switches: Array.from({ length: switches }, (_, at) => ({ datapath: datapath(at + 1), peer: '192.0.2.1:4', state: 'live', entries: hosts, ports: [port(1, '', true, false), port(2, '', true, false), port(3), port(4)] })),
    links: Array.from({ length: switches - 1 }, (_, at) => ({ one: place(at + 1, 2), other: place(at + 2, 1) })),
    hosts: Array.from({ length: hosts }, (_, at) => host(`02:00:00:00:${(at >> 8).toString(16).padStart(2, '0')}:${(at & 255).toString(16).padStart(2, '0')}`, [`10.0.${at >> 8}.${at & 255}`], place((at % switches) + 1, 3))),
  };
}

/** Does what a controller does with a change. */
export function changed(network, { host: mac, manager, to }) {
  const found = network.hosts.find((one) => one.mac === mac);
  if (!found) return { problem: [404, 'Not found', `host ${mac} is not known; it must send a packet first`] };
  if (manager) {
    found.manager = manager;
    return { message: `${mac} has the mobility manager ${manager} until the controller ends`, warnings: [] };
  }
  const access = network.accesses.find(({ id, serves }) => id === to && serves);
  if (!access) return { problem: [409, 'Not possible', `${to} is down, or its switch is away or cut off from the others; a host cannot be attached there`] };
  found.attachments = [access.place];
  found.active = [access.place];
  return { message: `${mac} is asked to go to ${to}`, warnings: [] };
}
