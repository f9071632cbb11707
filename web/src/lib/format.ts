// Numbers, times and names as people read them.

const WHOLE = new Intl.NumberFormat("en");

export function whole(value: number | null | undefined): string {
  return value === null || value === undefined ? "–" : WHOLE.format(value);
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

export function percent(share: number | null | undefined): string {
  return share === null || share === undefined ? "–" : `${Number((share * 100).toPrecision(3))} %`;
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
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 1) return `${Math.round(seconds * 1e3)} ms`;
  if (seconds < 60) return `${Number(seconds.toPrecision(3))} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.round(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function moment(us: number | null | undefined): string {
  return us === null || us === undefined ? "–" : new Date(us / 1000).toLocaleString();
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
