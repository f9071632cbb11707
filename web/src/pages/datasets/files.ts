// Files that are to become rows.
import type { Schema } from "../../answers";
import { change } from "../../lib/api";
import type { Split, Version } from "./sets";

export type Validation = Schema<"Validation">;

const FORMATS: Record<string, string> = { jsonl: "jsonl", ndjson: "jsonl", csv: "csv", parquet: "parquet", pq: "parquet" };
export const ACCEPTED = Object.keys(FORMATS).map((ending) => `.${ending}`).join(",");

/** The format that a file's name says, null where it says none that is taken. */
export function formatOf(file: File): string | null {
  return FORMATS[file.name.toLowerCase().split(".").at(-1) ?? ""] ?? null;
}

/** A name for the data set that a file becomes. */
export function nameFor(file: File): string {
  const stem = file.name.replace(/\.[^.]*$/, "").replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[^A-Za-z0-9]+/, "");
  return stem.slice(0, 128);
}

export type Choice = {
  kind: string;
  split: Split;
  /** Also take the training rows of this version. */
  parent: string | null;
  eval: number;
  validation: number;
  by: string;
};

function queryOf(file: File, choice: Choice): Record<string, string | number | null> {
  const holdsOut = choice.split === "train" && choice.eval + choice.validation > 0;
  return {
    format: formatOf(file) ?? "jsonl",
    split: choice.split,
    parent: choice.parent,
    kind: choice.kind,
    eval: holdsOut ? choice.eval / 100 : null,
    validation: holdsOut ? choice.validation / 100 : null,
    by: holdsOut ? choice.by.trim() : null,
  };
}

/** What an upload would come to, in this data set or in a new one; nothing is stored. */
export function validated(file: File, choice: Choice, dataset: string | null): Promise<Validation> {
  return change<Validation>("POST", "/api/v1/datasets/validate", {}, file, { ...queryOf(file, choice), dataset });
}

export async function uploaded(file: File, choice: Choice, name: string, { exists, skip }: { exists: boolean; skip: boolean }): Promise<Version> {
  if (!exists) await change("POST", "/api/v1/datasets", {}, { name });
  return change<Version>("POST", "/api/v1/datasets/{name}/upload", { name }, file, { ...queryOf(file, choice), on_error: skip ? "skip" : null });
}
