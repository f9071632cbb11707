// What a grader is tried on. It is stored nowhere, and stays while the page is not loaded anew: also where another version of the grader is shown.
import { session } from "../../lib/session.svelte";
import type { Sample } from "./samples";

export type Tried = { score: number | null; words: string };

export class Trial {
  /** The data set that the rows are of, if they are of one. */
  dataset = $state("");
  samples = $state<Sample[]>(["yes", "no"].map((output) => ({ output, item: { reference: "yes" }, asked: "" })));
  /** What came of it row by row, by the source that is written now. */
  tried = $state<(Tried | null)[]>([]);
  /** The version that was just made of that source, if one was. */
  kept: number | null = null;

  constructor(readonly project: string) {}
}

const trials = new Map<string, Trial>();

/** That of the grader of this name; without one, of the grader that has none yet. */
export function trialOf(grader: string): Trial {
  const project = session.login?.project ?? "";
  const known = trials.get(grader);
  // Another key may be logged in meanwhile.
  if (known?.project === project) return known;
  const made = new Trial(project);
  trials.set(grader, made);
  return made;
}

/** The grader that had no name has one now. */
export function nameTrial(grader: string): void {
  trials.set(grader, trialOf(""));
  trials.delete("");
}
