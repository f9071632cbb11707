// Data sets, their versions and rows as the pages name them.
import type { Row, Schema } from "../../answers";
import { textOf, type Message } from "../../parts/messages";

export type Dataset = Row<"/api/v1/datasets">;
export type Version = Schema<"DatasetVersion">;
export type AnyRow = Row<"/api/v1/datasets/{name}/versions/{version}/rows">;
export type Split = Schema<"RowProblem">["split"];

export const SPLITS: readonly Split[] = ["train", "eval", "validation"];

export const addressOf = (name: string): string => `/datasets/${encodeURIComponent(name)}`;

export function rowsOf(version: Version | undefined, split: Split): number {
  return version?.counts[`${split}.rows`] ?? 0;
}

/** How a version came to be, in one line. */
export function madeBy(version: Version, all: readonly Version[]): string {
  const { kind, format, origin, deployment } = version.recipe as { kind?: string; format?: string; origin?: string; deployment?: string };
  const parent = all.find((each) => each.id === version.parent || each.manifest === version.parent);
  const of = parent ? `version ${parent.number}` : "another version";
  if (kind === "split") return `split of ${of}`;
  if (kind === "curate") return `${of} and judged traffic${deployment ? ` of ${deployment}` : ""}`;
  return `${origin ? `from ${origin}` : `${format ?? "a"} file`}${version.parent ? `, added to ${of}` : ""}`;
}

type Said = Record<string, unknown>[] | string;
const saidAs = (said: Said, role: string): Message[] => (typeof said === "string" ? [{ role, content: said }] : said.map(asMessage));

/** A message of a row as conversations are shown: data sets keep reasoning as `reasoning_content`. */
function asMessage(message: Record<string, unknown>): Message {
  const reasoning = message.reasoning_content;
  return typeof reasoning === "string" ? ({ ...message, reasoning } as unknown as Message) : (message as unknown as Message);
}

/** What a row says: what is asked, and the answers by what they are. */
export function saidIn(row: AnyRow): { asked: Message[]; answers: { title: string; messages: Message[] }[] } {
  switch (row.kind) {
    case "chat":
      return { asked: row.messages.map(asMessage), answers: [] };
    case "prompt":
      return { asked: row.messages.map(asMessage), answers: [] };
    case "completion":
      return { asked: [{ role: "prompt", content: row.prompt }, { role: "completion", content: row.completion }], answers: [] };
    case "preference":
      return {
        asked: row.prompt ? [{ role: "prompt", content: row.prompt }] : (row.messages ?? []).map(asMessage),
        answers: [
          { title: "Preferred", messages: saidAs(row.preferred, "assistant") },
          { title: "Rejected", messages: saidAs(row.rejected, "assistant") },
        ],
      };
  }
}

const MOST_LETTERS = 160;
const brief = (message: Message | undefined): string => textOf(message?.content).slice(0, MOST_LETTERS).replace(/\s+/g, " ");

/** A row as a line: the question, and its answer. */
export function lineOf(row: AnyRow): { asked: string; answer: string } {
  const { asked, answers } = saidIn(row);
  if (answers.length > 0) return { asked: brief(asked.at(-1)), answer: brief(answers[0]!.messages.at(-1)) };
  if (row.kind === "prompt") return { asked: brief(asked.at(-1)), answer: "" };
  return { asked: brief(asked.at(-2)), answer: brief(asked.at(-1)) };
}
