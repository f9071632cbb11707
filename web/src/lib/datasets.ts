// Rows that come from other pages into data sets.
import { change, getAll } from "./api";

/** Put rows behind those of the newest version of a data set, which is made where it is not there; the number of the version that has them. `origin`: where they come from, in words. */
export async function addRows(name: string, rows: readonly unknown[], origin: string): Promise<number> {
  const existing = (await getAll("/api/v1/datasets")).find((dataset) => dataset.name === name);
  if (!existing) await change("POST", "/api/v1/datasets", {}, { name });
  const parent = existing?.versions.at(-1)?.id;
  const splits = { train: rows.map((row) => `${JSON.stringify(row)}\n`).join("") };
  const made = await change<{ number: number }>("POST", "/api/v1/datasets/{name}/versions", { name }, { format: "jsonl", origin, splits, ...(parent ? { parent } : {}) });
  return made.number;
}
