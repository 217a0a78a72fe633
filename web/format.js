// Formats quantities. An unknown value is a dash, never 0.

export const NONE = '–';

const unknown = (value) => value === null || value === undefined || Number.isNaN(value);

/** Three significant digits, without an exponent. */
function digits(value) {
  if (value === 0) return '0';
  if (value < 10) return value.toFixed(2);
  return value < 100 ? value.toFixed(1) : value.toFixed(0);
}

function scaled(value, step, units) {
  let place = 0;
  let rest = Math.abs(value);
  while (rest >= step * 0.9995 && place < units.length - 1) {
    rest /= step;
    place += 1;
  }
  return [(value < 0 ? '-' : '') + (place === 0 ? rest.toFixed(0) : digits(rest)), units[place]];
}

const RATES = ['bit/s', 'kbit/s', 'Mbit/s', 'Gbit/s', 'Tbit/s'];

/** A rate as `[number, unit]`. */
export const rateParts = (bps) => (unknown(bps) ? [NONE, ''] : scaled(bps, 1000, RATES));

export const rate = (bps) => rateParts(bps).join(' ').trim();

export const bytes = (count) => (unknown(count) ? NONE : scaled(count, 1000, ['B', 'kB', 'MB', 'GB', 'TB', 'PB']).join(' '));

export const rtt = (us) => {
  if (unknown(us)) return NONE;
  if (us < 100) return `${us.toFixed(0)} µs`;
  return us < 100_000 ? `${(us / 1000).toFixed(1)} ms` : `${(us / 1000).toFixed(0)} ms`;
};

export const percent = (share, places = 1) => (unknown(share) ? NONE : `${(share * 100).toFixed(places)} %`);

export const loss = (share) => (share === 0 ? '0 %' : percent(share, share < 0.1 ? 2 : 1));

export const watts = (power) => {
  if (unknown(power)) return NONE;
  return power < 1 ? `${(power * 1000).toFixed(0)} mW` : `${power.toFixed(2)} W`;
};

export const joules = (energy) => (unknown(energy) ? NONE : scaled(energy, 1000, ['J', 'kJ', 'MJ', 'GJ']).join(' '));

export const count = (number) => (unknown(number) ? NONE : Math.round(number).toLocaleString('en'));

export const number = (value, places = 2) => (unknown(value) ? NONE : value.toFixed(places));

export function duration(ms) {
  if (unknown(ms)) return NONE;
  const seconds = Math.floor(ms / 1000);
  if (seconds < 60) return `${seconds} s`;
  const two = (big, bigUnit, small, smallUnit) => (small ? `${big} ${bigUnit} ${small} ${smallUnit}` : `${big} ${bigUnit}`);
  if (seconds < 3600) return two(Math.floor(seconds / 60), 'min', seconds % 60, 's');
  if (seconds < 86400) return two(Math.floor(seconds / 3600), 'h', Math.floor((seconds % 3600) / 60), 'min');
  return two(Math.floor(seconds / 86400), 'd', Math.floor((seconds % 86400) / 3600), 'h');
}

const pad = (value) => String(value).padStart(2, '0');

export const clock = (ms) => {
  const at = new Date(ms);
  return `${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}`;
};

export const day = (ms) => new Date(ms).toLocaleDateString('en-GB', { weekday: 'long', day: 'numeric', month: 'long' });

/** The last component of a path. */
export const tail = (path) => path.slice(path.lastIndexOf('/') + 1) || path;

/** `1 flow`, `2 flows`. */
export const plural = (amount, one, many = `${one}s`) => `${count(amount)} ${amount === 1 ? one : many}`;

/** Labels of the states of links, peers and paths, and their tones: `good`, `warn`, `bad` or `idle`. */
export const STATES = {
  up: ['Up', 'good'],
  good: ['Good', 'good'],
  dead: ['Dead', 'bad'],
  down: ['Down', 'bad'],
  unreachable: ['Unreachable', 'bad'],
  refused: ['Refused', 'bad'],
  capped: ['Allowance used up', 'warn'],
  suspect: ['Suspect', 'warn'],
  backup: ['Backup', 'idle'],
  excluded: ['Excluded', 'idle'],
  probing: ['Probing', 'idle'],
  none: ['No path', 'idle'],
  connecting: ['Connecting', 'idle'],
  idle: ['Idle', 'idle'],
  unknown: ['Unknown', 'idle'],
};

export const state = (name) => STATES[name] ?? [name ?? NONE, 'idle'];
