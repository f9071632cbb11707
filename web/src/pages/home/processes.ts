// Engines, replicas and runners, and what each that has weights proved of them before it took traffic.
import type { Answer } from "../../answers";
import { inTime, Refused } from "../../lib/api";
import { several } from "../../lib/format";

type Status = Answer<"/api/v1/status">;

/** What a process says of itself, which the document leaves open. */
type Detail = {
  proved?: { root: string; probe_max_abs: number };
  proved_versions?: Record<string, { probe?: { max_abs: number } | null }>;
  scrub_rounds?: number;
  condemned?: Record<string, unknown>;
};

/** What `/healthz` says beside: those that ask for jobs, and replicas that are there and say nothing. */
export type Health = { replicas: { silent: string[] }; runners: string[] };

/** It answers 503 while an engine starts, with the same beside. */
export async function health(): Promise<Health> {
  const told = await inTime("/healthz", async (signal) => (await fetch("/healthz", { signal })).json() as Promise<Health>).catch((error: unknown) => {
    if (error instanceof Refused) throw error;
    return null;
  });
  if (!told?.runners) throw new Error("the server does not say how it is");
  return told;
}

export type Process = { name: string; state: string; kind: string | undefined; serves: string; root: string; answers: string; versions: string; checked: string; condemned: string };

/** What a process proves of the weights that it holds, in the order of the columns. */
export const CHECKS: readonly { title: string; help: string }[] = [
  { title: "Weights, read back", help: "the hash of what it read back from its memory when it started, before it answered anybody" },
  { title: "Test answer", help: "what it says of fixed tokens beside what the trainer's forward says of them: equal to the bit, or within so many nats. A nat is a difference of natural logarithms: 0.01 nats are about 1 % of a probability" },
  { title: "Versions in memory", help: "how many more it holds, and how far the test answers of those were off at most" },
  { title: "Checked again", help: "how often it has read all of its weights back since, while it served" },
  { title: "Out of service", help: "versions that failed such a check, which it answers with no more" },
];

/** A replica that starts when something is deployed on its base: that it does not run says nothing of how the server is. */
export const NOT_NEEDED = "not needed";

export function processesOf(status: Status, { replicas: { silent }, runners }: Health): Process[] {
  const known = new Set(status.replicas.map(({ name }) => name));
  /** Of these bases replicas answer, and engines only train. */
  const replicated = new Set(status.replicas.flatMap(({ base_hash, serves, wanted }) => (wanted && serves === "production" ? [base_hash] : [])));
  return [
    ...status.engines.map((engine) => shown(engineOf(engine), engine.ready ? (engine.stands_in ? "stands in" : "ready") : "starting", engine.stands_in ? "warn" : undefined, replicated.has(engine.base_hash) ? "training" : "training, production", engine.detail)),
    ...status.replicas.map((replica) => shown(replica.name, silent.includes(replica.name) ? "silent" : replica.ready ? "ready" : replica.wanted ? "starting" : NOT_NEEDED, undefined, replica.serves, replica.detail)),
    ...silent.filter((name) => !known.has(name)).map((name) => shown(name, "silent", undefined, "", {})),
    ...runners.map((name): Process => ({ name: `runner ${name}`, state: "ready", kind: undefined, serves: "jobs", root: "", answers: "–", versions: "–", checked: "–", condemned: "–" })),
  ];
}

/** Of those the engine and the replicas of one base model; `process` is what each is called where it is said who has proved something. */
export function serversOf(status: Status, health: Health, base: string): (Process & { process: string })[] {
  const known = new Map(processesOf(status, health).map((each) => [each.name, each]));
  const names = [
    ...status.engines.filter((engine) => engine.base_hash === base).map((engine) => ({ name: engineOf(engine), process: "engine" })),
    ...status.replicas.filter((replica) => replica.base_hash === base).map(({ name }) => ({ name, process: name })),
  ];
  return names.map(({ name, process }) => ({ ...known.get(name)!, process }));
}

const engineOf = (engine: Status["engines"][number]): string => `engine of ${engine.aliases.join(", ")}`;

function shown(name: string, state: string, kind: string | undefined, serves: string, told: Record<string, unknown>): Process {
  const detail = told as Detail;
  const versions = Object.values(detail.proved_versions ?? {});
  const differences = versions.flatMap((version) => (version.probe ? [version.probe.max_abs] : []));
  return {
    name,
    state,
    kind,
    serves,
    root: detail.proved?.root ?? "",
    answers: detail.proved ? answered(detail.proved.probe_max_abs) : "–",
    versions: differences.length ? `${versions.length}, answers ${answered(Math.max(...differences))}` : String(versions.length),
    checked: several(detail.scrub_rounds ?? 0, "time"),
    condemned: Object.keys(detail.condemned ?? {}).map((version) => version.slice(0, 12)).join(", ") || "none",
  };
}

function answered(difference: number): string {
  return difference === 0 ? "equal bits" : `within ${difference.toPrecision(2)} nats`;
}
