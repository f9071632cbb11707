// Numbers, times and names as people read them.

const WHOLE = new Intl.NumberFormat("en");
// Made once: to make one takes a hundred times as long as to use it, and tables show thousands of moments.
const TIME = { hour: "numeric", minute: "2-digit", second: "2-digit" } as const;
const DAY = { month: "numeric", day: "numeric" } as const;
const MOMENT = new Intl.DateTimeFormat(undefined, { year: "numeric", ...DAY, ...TIME });
const TIME_OF_DAY = new Intl.DateTimeFormat(undefined, TIME);
const DAY_AND_TIME = new Intl.DateTimeFormat(undefined, { ...DAY, hour: "numeric", minute: "2-digit" });
/** Of a dollar. */
const MOST_DECIMALS = 10;

export function whole(value: number | null | undefined): string {
  return value === null || value === undefined ? "–" : WHOLE.format(value);
}

/** How many there are of what has this name. */
export function several(count: number | null | undefined, name: string): string {
  return `${whole(count)} ${name}${count === 1 ? "" : "s"}`;
}

/** Four digits that count. */
export function figure(value: number | null | undefined): string {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return String(Number(value.toPrecision(3)).toExponential());
  if (Number.isInteger(value)) return WHOLE.format(value);
  return String(Number(value.toPrecision(4)));
}

/** Three digits that count; what is not all is never 100 %. */
export function percent(share: number | null | undefined): string {
  if (share === null || share === undefined) return "–";
  const rounded = Number((share * 100).toPrecision(3));
  return `${share < 1 && rounded >= 100 ? 99.9 : rounded} %`;
}

export function bytes(count: number): string {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let size = count;
  let unit = 0;
  for (; size >= 1024 && unit < units.length - 1; unit++) size /= 1024;
  return `${unit === 0 ? size : size.toFixed(1)} ${units[unit]}`;
}

export function duration(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined) return "–";
  // Rounded before a unit is chosen, so that none is full: 60 s are a minute.
  const micros = Math.round(seconds * 1e6);
  if (micros === 0) return "0 s";
  if (micros < 1000) return `${micros} µs`;
  const millis = Math.round(seconds * 1e3);
  if (millis < 1000) return `${millis} ms`;
  const few = Number(seconds.toPrecision(3));
  if (few < 60) return `${few} s`;
  const all = Math.round(seconds);
  const minutes = Math.floor(all / 60);
  if (minutes < 60) return `${minutes} min ${all % 60} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function moment(us: number | null | undefined): string {
  return us === null || us === undefined ? "–" : MOMENT.format(us / 1000);
}

/** The time of day, to the second, where it was since `today_ms`, when the day began; before that the day, too, to the minute. */
export function recently(us: number, today_ms: number): string {
  return (us / 1000 >= today_ms ? TIME_OF_DAY : DAY_AND_TIME).format(us / 1000);
}

/** How long ago; `now` in milliseconds. */
export function ago(us: number | null | undefined, now: number): string {
  if (us === null || us === undefined) return "never";
  const seconds = Math.max(0, now / 1000 - us / 1e6);
  if (seconds < 10) return "just now";
  if (seconds < 60) return `${Math.floor(seconds)} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 172_800) return `${Math.floor(seconds / 3600)} h ago`;
  return `${Math.floor(seconds / 86_400)} d ago`;
}

/** The beginning of a hash, enough to tell it from others. */
export function short(hash: string | null | undefined): string {
  return hash ? hash.slice(0, 12) : "–";
}

/** US dollars, in three digits that count where they are less than one, and cents in any case. */
export function usd(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "$0";
  if (value < 1e-6) return `$${value.toExponential(2)}`;
  const few = Number(value.toPrecision(3));
  return `$${few >= 1 ? value.toFixed(2) : few.toFixed(12).replace(/(\.\d\d\d*?)0+$/, "$1")}`;
}

/** The same for what stands below each other: as many decimals as the one that needs most, so that their points do too. */
export function usdAlike(values: Iterable<number | null | undefined>): (value: number | null | undefined) => string {
  let decimals = 2;
  for (const value of values) if (value && value < 1) decimals = Math.max(decimals, Number(value.toPrecision(3)).toFixed(MOST_DECIMALS).replace(/0+$/, "").split(".")[1]!.length);
  const least = 10 ** -decimals;
  return (value) => (value === null || value === undefined ? "–" : value > 0 && value < least / 2 ? `< $${least.toFixed(decimals)}` : `$${value.toFixed(decimals)}`);
}
