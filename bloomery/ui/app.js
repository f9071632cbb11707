// @ts-check
// Reads the public API every two seconds and shows runs, deployments, what was proved of weights, and traffic.
// Everything that came from a user or a model is inserted as text, never as markup.
import { curve } from "/ui/chart.js";

// What is read of answers is checked against the published document, see `web/src/answers.d.ts`.
/** @typedef {import("../../web/src/answers").Answer<"/api/v1/status">} Status */
/** @typedef {import("../../web/src/answers").Answer<"/api/v1/runs">} Runs */
/** @typedef {import("../../web/src/answers").Row<"/api/v1/runs">} Run */
/** @typedef {import("../../web/src/answers").Answer<"/api/v1/runs/{run_id}/metrics">} RunMetrics */
/** @typedef {import("../../web/src/answers").Answer<"/api/v1/deployments">} Deployments */
/** @typedef {import("../../web/src/answers").Row<"/api/v1/deployments">} Deployment */
/** @typedef {import("../../web/src/answers").Answer<"/api/v1/spans">} Spans */
/** @typedef {import("../../web/src/answers").Answer<"/api/v1/spans/{span_id}">} SpanDetail */
/** @typedef {import("../../web/src/answers").Answer<"/api/v1/feedback">} FeedbackPage */
/** @typedef {import("../../web/src/answers").Row<"/api/v1/feedback">} Feedback */
/**
 * What a process says of itself, which the document leaves open.
 * @typedef {object} Detail
 * @property {{ root: string, probe_max_abs: number }} [proved]
 * @property {Record<string, { probe?: { max_abs: number } | null }>} [proved_versions]
 * @property {number} [scrub_rounds]
 * @property {Record<string, unknown>} [condemned]
 */

const POLL_MS = 2000;
const MAX_ROWS = 50;
const KEY = "bloomery-key";
/** @type {Map<string, { after: number, values: number[] }>} */
const losses = new Map(); // by run id
/** @type {(id: string) => HTMLElement} */
const byId = (id) => /** @type {HTMLElement} */ (document.getElementById(id));
/** @type {(id: string) => HTMLInputElement | HTMLSelectElement} */
const field = (id) => /** @type {HTMLInputElement | HTMLSelectElement} */ (byId(id));

takeKeyFromAddress();
byId("login").addEventListener("submit", login);
byId("leave").addEventListener("click", () => logout("the key is forgotten"));
byId("kinds").addEventListener("change", refresh);
poll();

function takeKeyFromAddress() {
  const key = new URLSearchParams(location.hash.slice(1)).get("key");
  if (!key) return;
  sessionStorage.setItem(KEY, key);
  // The key must not stay in the address, where it would be copied along with it.
  history.replaceState(null, "", location.pathname);
}

/** @param {Event} event */
function login(event) {
  event.preventDefault();
  sessionStorage.setItem(KEY, field("key").value.trim());
  field("key").value = "";
  refresh();
}

/** @param {string} reason */
function logout(reason) {
  sessionStorage.removeItem(KEY);
  losses.clear();
  show(false);
  say(reason, false);
}

async function poll() {
  if (!document.hidden) await refresh();
  setTimeout(poll, POLL_MS);
}

async function refresh() {
  if (!sessionStorage.getItem(KEY)) {
    show(false);
    return say("enter the API key", false);
  }
  try {
    await Promise.all([showRuns(), showDeployments(), showTraffic(), showStatus()]);
    show(true);
  } catch (error) {
    const { status, message } = /** @type {Error & { status?: number }} */ (error);
    if (status === 401) logout("the server does not know this key");
    else say(message, true);
  }
}

/**
 * @param {string} path
 * @returns {Promise<any>} whose type the caller says
 */
async function get(path) {
  const answer = await fetch(`/api/v1${path}`, { headers: { "x-api-key": sessionStorage.getItem(KEY) ?? "" } });
  if (answer.ok) return answer.json();
  const body = await answer.json().catch(() => null);
  throw Object.assign(new Error(body?.error?.message ?? `the server answers ${answer.status}`), { status: answer.status });
}

async function showStatus() {
  /** @type {Status} */
  const status = await get("/status");
  /** @type {(engine: Status["engines"][number]) => string} */
  const ready = (engine) => (engine.stands_in ? "ready, serves for its replicas" : "ready");
  const engines = status.engines.map((engine) => `${engine.aliases.join(", ")}: ${engine.ready ? ready(engine) : "starting"}`).join(" · ");
  const wanted = status.replicas.filter((replica) => replica.wanted);
  const replicas = wanted.length ? ` · ${wanted.filter((replica) => replica.ready).length} of ${wanted.length} replicas ready` : "";
  showProcesses(status);
  const { mode, dropped, failed } = status.traffic;
  const lost = dropped + failed;
  say(`${engines}${replicas} · recording ${mode}${lost ? ` · ${lost} spans lost` : ""}`, lost > 0);
}

// What each process read back from its memory, and how it answered the probe: before it took traffic, and for each version before anybody got it.
/** @param {Status} status */
function showProcesses(status) {
  /** @type {{ name: string, detail: Detail }[]} */
  const processes = [
    ...status.engines.map((engine) => ({ name: `engine of ${engine.aliases.join(", ")}`, detail: engine.detail })),
    ...status.replicas.map((replica) => ({ name: replica.name, detail: replica.detail })),
  ];
  const proving = processes.flatMap(({ name, detail }) => (detail.proved ? [{ name, detail, proved: detail.proved }] : []));
  fill("processes", proving, "no process answers yet", ({ name, detail, proved }) =>
    row([
      cell(name),
      cell(short(proved.root), "code"),
      cell(answered(proved.probe_max_abs)),
      cell(versionsOf(detail)),
      cell(`${detail.scrub_rounds ?? 0} rounds`),
      cell(Object.keys(detail.condemned ?? {}).map(short).join(", ") || "none"),
    ]),
  );
}

/** @param {Detail} detail */
function versionsOf(detail) {
  const versions = Object.values(detail.proved_versions ?? {});
  const differences = versions.flatMap((version) => (version.probe ? [version.probe.max_abs] : []));
  return differences.length ? `${versions.length}, probes ${answered(Math.max(...differences))}` : String(versions.length);
}

/** @param {number} difference */
function answered(difference) {
  return difference === 0 ? "equal bits" : `within ${difference.toPrecision(2)} nats`;
}

async function showRuns() {
  /** @type {Runs} */
  const { data: runs } = await get(`/runs?limit=${MAX_ROWS}`);
  await Promise.all(runs.map(fetchLosses));
  fill("runs", runs, "no runs yet", (run) => {
    const values = losses.get(run.id)?.values ?? [];
    return row([
      cell(run.name ?? run.id, "code"),
      cell(run.base_model),
      cell(run.rank === 0 ? "all parameters" : `rank ${run.rank}`),
      cell(run.step, "number"),
      cell(values.at(-1)?.toPrecision(4) ?? "", "number"),
      cell(curve(values)),
      cell(run.error ?? run.state),
    ]);
  });
}

/** @param {Run} run */
async function fetchLosses(run) {
  const known = losses.get(run.id) ?? { after: -1, values: [] };
  losses.set(run.id, known);
  /** @type {RunMetrics} */
  const { data } = await get(`/runs/${encodeURIComponent(run.id)}/metrics?after=${known.after}`);
  for (const point of data) {
    if (point.seq <= known.after) continue; // two refreshes may overlap
    known.after = point.seq;
    const { loss } = point.values;
    if (typeof loss === "number" && Number.isFinite(loss)) known.values.push(loss);
  }
}

// "pass" where sampler and trainer agree as promised; the difference stands beside it where there is one.
/** @param {Deployment["fidelity"]} card */
function fidelity(card) {
  if (!card) return "not measured yet";
  return card.max_abs === 0 ? `${card.verdict}, equal bits` : `${card.verdict}, k3 ${card.k3.toPrecision(1)} (${card.mode})`;
}

async function showDeployments() {
  /** @type {Deployments} */
  const { data: deployments } = await get(`/deployments?limit=${MAX_ROWS}`);
  fill("deployments", deployments, "nothing is deployed yet", (deployment) =>
    row([
      cell(deployment.name),
      cell(deployment.base_model),
      cell(`revision ${deployment.live.number} of ${deployment.revisions.length}`),
      cell(short(deployment.live.version), "code"),
      cell(fidelity(deployment.fidelity)),
      cell(deployment.proved.map((proved) => proved.process).join(", ") || "not in memory"),
      cell(time(deployment.live.updated_us)),
    ]),
  );
}

async function showTraffic() {
  const kinds = field("kinds").value;
  /** @type {[Spans, FeedbackPage]} */
  const [spans, feedback] = await Promise.all([get(`/spans?limit=${MAX_ROWS}&${kinds}`), get("/feedback?limit=500")]);
  fill("traffic", spans.data, "nothing is recorded yet", (span) => {
    const shown = row([
      cell(time(span.started_us)),
      cell(span.deployment ? `${span.deployment} (revision ${span.revision})` : span.model),
      cell(short(span.version), "code"),
      cell(`${span.in_tokens} + ${span.out_tokens}`, "number"),
      cell(span.duration_us === null ? "" : (span.duration_us / 1e6).toFixed(2), "number"),
      cell(span.error_code ?? span.finish_reason ?? span.status),
      cell(span.consent),
      cell(feedback.data.filter((given) => given.target === span.id).map(judgement).join(", ")),
    ]);
    shown.className = "open";
    shown.addEventListener("click", () => showDetail(span.id).catch((error) => say(error.message, true)));
    return shown;
  });
}

/** @param {Feedback} given */
function judgement(given) {
  const value = typeof given.value === "string" ? given.value : JSON.stringify(given.value);
  return `${given.metric}: ${value.length > 40 ? `${value.slice(0, 40)}…` : value}`;
}

/** @param {string} id */
async function showDetail(id) {
  /** @type {SpanDetail} */
  const detail = await get(`/spans/${encodeURIComponent(id)}`);
  byId("detail-title").textContent = id;
  byId("detail-body").textContent = JSON.stringify({ body: detail.body, feedback: detail.feedback }, null, 2);
  byId("detail").hidden = false;
}

/**
 * @template Item
 * @param {string} id
 * @param {Item[]} items
 * @param {string} nothing
 * @param {(item: Item) => HTMLElement} toRow
 */
function fill(id, items, nothing, toRow) {
  const empty = cell(nothing, "empty");
  empty.colSpan = 10;
  byId(id).replaceChildren(...(items.length ? items.map(toRow) : [row([empty])]));
}

/** @param {HTMLElement[]} cells */
function row(cells) {
  const shown = document.createElement("tr");
  shown.append(...cells);
  return shown;
}

/**
 * @param {unknown} content
 * @param {string} [className]
 */
function cell(content, className = "") {
  const shown = document.createElement("td");
  shown.className = className;
  // append() takes nodes as they are and everything else as text.
  shown.append(content instanceof Node ? content : String(content));
  return shown;
}

/** @param {string} version */
function short(version) {
  return version.slice(0, 12);
}

/** @param {number} us */
function time(us) {
  return new Date(us / 1000).toLocaleString();
}

/** @param {boolean} open */
function show(open) {
  byId("board").hidden = !open;
  byId("leave").hidden = !open;
  byId("login").hidden = open;
}

/**
 * @param {string} text
 * @param {boolean} trouble
 */
function say(text, trouble) {
  byId("state").textContent = text;
  byId("state").className = trouble ? "trouble" : "";
}
