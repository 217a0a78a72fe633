// What the drawing and the tables of a controller's network share: names, loads, and the links that were lost.

/** A datapath id without leading zeros. */
export const short = (datapath) => datapath.replace(/^0+(?=.)/, '');

/** A place as a key. */
export const keyOf = ({ datapath, port }) => `${datapath}:${port}`;

/** A place as `braid net status` shows it. */
export const placeName = ({ datapath, port }) => `${short(datapath)}:${port}`;

export const linkName = ({ one, other }) => `${placeName(one)} to ${placeName(other)}`;

/** The share of an access point that is in use, in its busier direction; `null` if that is not measured. */
export function usedShare({ capacity_bps: capacity, rate_up_bps: up, rate_down_bps: down }) {
  if (up === null && down === null) return null;
  return Math.min(Math.max(up ?? 0, down ?? 0) / Math.max(capacity, 1), 1);
}

/** From this share on, an access point is busy: the mobility manager `balance` moves hosts away. */
export const BUSY = 0.8;

/** States of switches: label and tone. */
const SWITCH_STATES = {
  live: ['Live', 'good'],
  reading: ['Reading tables', 'warn'],
  settling: ['Finding links', 'warn'],
  silent: ['Silent', 'bad'],
  away: ['Away', 'bad'],
  'cut-off': ['Cut off', 'bad'],
};

export const switchState = (name) => SWITCH_STATES[name] ?? [name, 'idle'];

/** For how long a lost link is shown. */
const LOST_MS = 300_000;

/**
 * Returns a function that takes the links of each answer, and the time, and returns them with `key` and `lost`, together with those that were lost a short time
 * ago: the controller reports only links that work.
 */
export function linkMemory() {
  const known = new Map();
  return (links, now) => {
    const taken = new Set(links.flatMap(({ one, other }) => [keyOf(one), keyOf(other)]));
    const present = new Map(links.map((link) => [[keyOf(link.one), keyOf(link.other)].sort().join(' '), link]));
    for (const [key, entry] of known) {
      if (present.has(key)) continue;
      entry.lostAt ??= now;
      entry.lost = true;
      // A port with another link was given another cable.
      if (now - entry.lostAt > LOST_MS || taken.has(keyOf(entry.one)) || taken.has(keyOf(entry.other))) known.delete(key);
    }
    for (const [key, { one, other, full_frames: full }] of present) known.set(key, { key, one, other, small: full === false, lost: false });
    return [...known.values()].sort((a, b) => (a.key < b.key ? -1 : 1));
  };
}
