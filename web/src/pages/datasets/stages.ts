// The stages that rows of an import pass, in their order, by what a version counts.
import { SPLITS, type Split } from "./sets";

export type Stage = { name: string; title: string; help: string; leaves: boolean; counts: Partial<Record<Split, number>>; total: number };

const LEAVES: readonly { name: string; title: string; help: string }[] = [
  { name: "rejected", title: "broken", help: "they are no rows; the reasons are kept" },
  { name: "duplicate", title: "there already", help: "the same row twice" },
  { name: "held_out_exact", title: "held out", help: "the same prompt stands in a held-out split" },
  { name: "held_out_near", title: "nearly held out", help: "the prompt is nearly one of a held-out split" },
  { name: "held_out_group", title: "of a held-out group", help: "rows of their group are held out" },
];

export function stagesOf(counts: Record<string, number>): Stage[] {
  const of = (name: string): Partial<Record<Split, number>> => Object.fromEntries(SPLITS.flatMap((split) => (counts[`${split}.${name}`] === undefined ? [] : [[split, counts[`${split}.${name}`]]])));
  const stage = (name: string, title: string, help: string, leaves: boolean, each = of(name)): Stage => ({ name, title, help, leaves, counts: each, total: Object.values(each).reduce((sum, rows) => sum + rows, 0) });
  const leaving = LEAVES.map(({ name, title, help }) => stage(name, title, help, true)).filter(({ total }) => total > 0);
  const admitted = of("admitted");
  const given: Partial<Record<Split, number>> = {};
  for (const part of [admitted, ...leaving.map((each) => each.counts)]) for (const split of SPLITS) if (part[split] !== undefined) given[split] = (given[split] ?? 0) + part[split];
  const taken = leaving.length > 0 ? [stage("given", "given", "rows of the files and of the version before", false, given), ...leaving] : [];
  return [...taken, stage("rows", "in the version", "what the split has, with what was held out before", false)];
}

/** What curation did with recorded requests. */
export function trafficOf(counts: Record<string, number>): { title: string; rows: number }[] {
  return Object.entries(counts)
    .filter(([name]) => name.startsWith("traffic."))
    .map(([name, rows]) => ({ title: name.slice("traffic.".length).replaceAll("_", " "), rows }));
}
