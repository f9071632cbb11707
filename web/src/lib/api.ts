// Requests to the public API, as whoever is logged in. The cookie that says who that is cannot be read by scripts, and proves nothing without a word
// that was told when it was made.
import type { paths } from "../api";
import type { Answer } from "../answers";
import { released } from "./press";

const CSRF = "x-csrf-token";
/** What is read for a page is there by then, or never: changes, streams and files take as long as they take. */
const READ_WITHIN_MS = 60_000;

/** What the server refused, in its words: they say what to change. */
export class Refused extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly field: string | null = null,
  ) {
    super(message);
  }

  /** Whether it says that nobody is logged in: the login is over, or the word is not the one that goes with it. */
  get nobody(): boolean {
    return this.status === 401 || this.field === CSRF;
  }
}

/** Whether what was asked is at fault, and will be the next time: not who asks too often, or a server that is away. */
export function ofWhatWasAsked(error: unknown): boolean {
  return error instanceof Refused && error.status >= 400 && error.status < 500 && error.status !== 429;
}

/** By a key instead of the login, and with these headers too. */
type As = { key?: string; beside?: Record<string, string> };
type Values = Record<string, string | number | boolean | null | undefined | readonly string[]>;

let loggedOut: () => void = () => {};

/** Who hears that the login has ended. */
export function whenLoggedOut(listener: () => void): void {
  loggedOut = listener;
}

/** The word that every request carries. Browsers keep it for this port alone, and the cookie for the host; every tab of this page has the newest. */
export const word = {
  name: "bloomery-csrf",
  read: (): string => localStorage.getItem(word.name) ?? "",
  keep: (told: string): void => localStorage.setItem(word.name, told),
  forget: (): void => localStorage.removeItem(word.name),
};

/** The answer of a route of the document: `get("/api/v1/runs/{run_id}", { run_id: "..." }, { limit: 50 })`. */
export async function get<Route extends keyof paths>(route: Route, path: Record<string, string> = {}, query: Values = {}): Promise<Answer<Route>> {
  try {
    return (await read(address(route, path, query))) as Answer<Route>;
  } finally {
    // Whatever is told is shown, and moves the page.
    await released();
  }
}

/** What is answered at an address, whole. */
export function read(url: string, as: As = {}): Promise<unknown> {
  return inTime(url, async (signal) => (await send("GET", url, undefined, signal, as)).json());
}

/** What comes of reading an address, or in words that nobody has answered for too long. */
export async function inTime<Result>(url: string, reading: (signal: AbortSignal) => Promise<Result>): Promise<Result> {
  const late = new AbortController();
  const timer = setTimeout(() => late.abort(), READ_WITHIN_MS);
  try {
    return await reading(late.signal);
  } catch (error) {
    throw late.signal.aborted ? new Refused(0, `the server was asked for \`${url.split("?")[0]}\` and has not answered within ${READ_WITHIN_MS / 1000} s`) : error;
  } finally {
    clearTimeout(timer);
  }
}

/** Carry something out; `change("POST", "/api/v1/jobs/{job}/pause", { job })`. */
export async function change<Result = unknown>(
  method: "POST" | "DELETE",
  route: keyof paths,
  path: Record<string, string> = {},
  body?: unknown,
  query: Values = {},
  signal?: AbortSignal,
): Promise<Result> {
  try {
    const answer = await send(method, address(route, path, query), body, signal);
    return (answer.status === 204 ? undefined : await answer.json()) as Result;
  } finally {
    await released();
  }
}

/** Everything that a route lists, page by page, up to `most` rows. What comes to the front of a list meanwhile moves rows to the next page, which has them once more. */
export async function getAll<Route extends keyof paths>(
  route: Route,
  path: Record<string, string> = {},
  query: Values = {},
  most = 10_000,
): Promise<Answer<Route> extends { data: infer Rows } ? Rows : never> {
  const rows: unknown[] = [];
  const ids = new Set<string>();
  let more = true;
  for (let offset = 0; more && offset < most; ) {
    const limit = Math.min(500, most - offset);
    const page = (await get(route, path, { ...query, limit, offset })) as { data: { id?: unknown }[]; has_more?: boolean };
    for (const row of page.data) {
      if (typeof row.id === "string") {
        if (ids.has(row.id)) continue;
        ids.add(row.id);
      }
      rows.push(row);
    }
    offset += page.data.length;
    more = Boolean(page.has_more) && page.data.length > 0;
  }
  return rows as never;
}

/** Hand over what a route answers with as a file; a link would not carry the word. */
export async function download(route: keyof paths, path: Record<string, string>, query: Values, name: string): Promise<void> {
  const file = URL.createObjectURL(await (await send("GET", address(route, path, query))).blob());
  const link = Object.assign(document.createElement("a"), { href: file, download: name });
  link.click();
  // The browser has taken it by then; until it is revoked it stays in memory.
  setTimeout(() => URL.revokeObjectURL(file), 60_000);
}

/** Whose key this is; nobody is logged in or out by that. */
export async function ownerOf(key: string): Promise<{ name: string; project: string }> {
  const said = (await read("/api/v1/auth/apikey/me", { key })) as { name: string; details: { org_details: { name: string } } };
  return { name: said.name, project: said.details.org_details.name };
}

/** A request as it is, by the login or a key; the playground streams answers with it. */
export async function send(method: string, url: string, body?: unknown, signal?: AbortSignal, { key, beside }: As = {}): Promise<Response> {
  const headers: Record<string, string> = { ...beside };
  headers[CSRF] = word.read();
  if (key) headers["x-api-key"] = key;
  const raw = body instanceof Blob;
  if (body !== undefined && !raw) headers["content-type"] = "application/json";
  if (method !== "GET" && url.startsWith("/api/")) headers["idempotency-key"] = drawn();
  let answer: Response;
  try {
    answer = await fetch(url, { method, headers, body: body === undefined ? null : raw ? body : JSON.stringify(body), credentials: "same-origin", signal: signal ?? null });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new Refused(0, "the server does not answer");
  }
  if (answer.ok) return answer;
  const told = (await answer.json().catch(() => null)) as { error?: { message?: string; field?: string | null; param?: string | null } } | null;
  const refused = new Refused(answer.status, told?.error?.message ?? `the server answers ${answer.status}`, told?.error?.field ?? told?.error?.param ?? null);
  if (refused.nobody && !key && !url.endsWith("/login")) loggedOut();
  throw refused;
}

/** A name that nobody else chooses. `randomUUID` is only there behind https and on this machine. */
function drawn(): string {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function address(route: string, path: Record<string, string>, query: Values): string {
  const filled = route.replace(/\{(\w+)\}/g, (_, name: string) => encodeURIComponent(path[name] ?? ""));
  const wanted = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value === undefined || value === null || value === "") continue;
    for (const each of Array.isArray(value) ? value : [value]) wanted.append(name, String(each));
  }
  const text = wanted.toString();
  return text ? `${filled}?${text}` : filled;
}
