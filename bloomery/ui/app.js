// Reads the public API every two seconds and shows runs, deployments, what was proved of weights, and traffic.
// Everything that came from a user or a model is inserted as text, never as markup.
import { curve } from "/ui/chart.js";

const POLL_MS = 2000;
const MAX_ROWS = 50;
const KEY = "bloomery-key";
const losses = new Map(); // run id -> {after, values}
const byId = (id) => document.getElementById(id);

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

function login(event) {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value.trim());
  byId("key").value = "";
  refresh();
}

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
    if (error.status === 401) logout("the server does not know this key");
    else say(error.message, true);
  }
}

async function get(path) {
  const answer = await fetch(`/api/v1${path}`, { headers: { "x-api-key": sessionStorage.getItem(KEY) ?? "" } });
  if (answer.ok) return answer.json();
  const body = await answer.json().catch(() => null);
  throw Object.assign(new Error(body?.error?.message ?? `the server answers ${answer.status}`), { status: answer.status });
}

async function showStatus() {
  const status = await get("/status");
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
function showProcesses(status) {
  const processes = [
    ...status.engines.map((engine) => ({ name: `engine of ${engine.aliases.join(", ")}`, detail: engine.detail })),
    ...status.replicas.map((replica) => ({ name: replica.name, detail: replica.detail })),
  ].filter(({ detail }) => detail.proved);
  fill("processes", processes, "no process answers yet", ({ name, detail }) =>
    row([
      cell(name),
      cell(short(detail.proved.root), "code"),
      cell(answered(detail.proved.probe_max_abs)),
      cell(versionsOf(detail)),
      cell(`${detail.scrub_rounds ?? 0} rounds`),
      cell(Object.keys(detail.condemned ?? {}).map(short).join(", ") || "none"),
    ]),
  );
}

function versionsOf(detail) {
  const versions = Object.values(detail.proved_versions ?? {});
  const differences = versions.flatMap((version) => (version.probe ? [version.probe.max_abs] : []));
  return differences.length ? `${versions.length}, probes ${answered(Math.max(...differences))}` : String(versions.length);
}

function answered(difference) {
  return difference === 0 ? "equal bits" : `within ${difference.toPrecision(2)} nats`;
}

async function showRuns() {
  const runs = (await get(`/runs?limit=${MAX_ROWS}`)).data;
  await Promise.all(runs.map(fetchLosses));
  fill("runs", runs, "no runs yet", (run) => {
    const values = losses.get(run.id)?.values ?? [];
    return row([
      cell(run.name ?? run.id, "code"),
      cell(run.base_model),
      cell(run.rank === 0 ? "all parameters" : `rank ${run.rank}`),
      cell(run.step, "number"),
      cell(values.length ? values.at(-1).toPrecision(4) : "", "number"),
      cell(curve(values)),
      cell(run.error ?? run.state),
    ]);
  });
}

async function fetchLosses(run) {
  const known = losses.get(run.id) ?? { after: -1, values: [] };
  losses.set(run.id, known);
  const { data } = await get(`/runs/${encodeURIComponent(run.id)}/metrics?after=${known.after}`);
  for (const point of data) {
    if (point.seq <= known.after) continue; // two refreshes may overlap
    known.after = point.seq;
    if (Number.isFinite(point.values.loss)) known.values.push(point.values.loss);
  }
}

// "pass" where sampler and trainer agree as promised; the difference stands beside it where there is one.
function fidelity(card) {
  if (card === null) return "not measured yet";
  return card.max_abs === 0 ? `${card.verdict}, equal bits` : `${card.verdict}, k3 ${card.k3.toPrecision(1)} (${card.mode})`;
}

async function showDeployments() {
  const deployments = (await get(`/deployments?limit=${MAX_ROWS}`)).data;
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
  const kinds = byId("kinds").value;
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

function judgement(given) {
  const value = typeof given.value === "string" ? given.value : JSON.stringify(given.value);
  return `${given.metric}: ${value.length > 40 ? `${value.slice(0, 40)}…` : value}`;
}

async function showDetail(id) {
  const detail = await get(`/spans/${encodeURIComponent(id)}`);
  byId("detail-title").textContent = id;
  byId("detail-body").textContent = JSON.stringify({ body: detail.body, feedback: detail.feedback }, null, 2);
  byId("detail").hidden = false;
}

function fill(id, items, nothing, toRow) {
  const empty = cell(nothing, "empty");
  empty.colSpan = 10;
  byId(id).replaceChildren(...(items.length ? items.map(toRow) : [row([empty])]));
}

function row(cells) {
  const shown = document.createElement("tr");
  shown.append(...cells);
  return shown;
}

function cell(content, className = "") {
  const shown = document.createElement("td");
  shown.className = className;
  // append() takes nodes as they are and everything else as text.
  shown.append(content instanceof Node ? content : String(content));
  return shown;
}

function short(version) {
  return version.slice(0, 12);
}

function time(us) {
  return new Date(us / 1000).toLocaleString();
}

function show(open) {
  byId("board").hidden = !open;
  byId("leave").hidden = !open;
  byId("login").hidden = open;
}

function say(text, trouble) {
  byId("state").textContent = text;
  byId("state").className = trouble ? "trouble" : "";
}
