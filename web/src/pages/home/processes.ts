// Engines and replicas, and what each proved of its weights before it took traffic.
import type { Answer } from "../../answers";

type Status = Answer<"/api/v1/status">;

/** What a process says of itself, which the document leaves open. */
type Detail = {
  proved?: { root: string; probe_max_abs: number };
  proved_versions?: Record<string, { probe?: { max_abs: number } | null }>;
  scrub_rounds?: number;
  condemned?: Record<string, unknown>;
};

export type Process = { name: string; state: string; kind: string | undefined; root: string; probe: string; versions: string; scrubbed: string; condemned: string };

export function processesOf(status: Status): Process[] {
  return [
    ...status.engines.map((engine) => shown(`engine of ${engine.aliases.join(", ")}`, engine.ready ? (engine.stands_in ? "stands in" : "ready") : "starting", engine.stands_in ? "warn" : undefined, engine.detail)),
    ...status.replicas.map((replica) => shown(replica.name, replica.ready ? "ready" : replica.wanted ? "starting" : "leaving", undefined, replica.detail)),
  ];
}

function shown(name: string, state: string, kind: string | undefined, told: Record<string, unknown>): Process {
  const detail = told as Detail;
  const versions = Object.values(detail.proved_versions ?? {});
  const differences = versions.flatMap((version) => (version.probe ? [version.probe.max_abs] : []));
  return {
    name,
    state,
    kind,
    root: detail.proved?.root ?? "",
    probe: detail.proved ? answered(detail.proved.probe_max_abs) : "–",
    versions: differences.length ? `${versions.length}, probes ${answered(Math.max(...differences))}` : String(versions.length),
    scrubbed: `${detail.scrub_rounds ?? 0} rounds`,
    condemned: Object.keys(detail.condemned ?? {}).map((version) => version.slice(0, 12)).join(", ") || "none",
  };
}

function answered(difference: number): string {
  return difference === 0 ? "equal bits" : `within ${difference.toPrecision(2)} nats`;
}
