// Rows of a data set as a grader sees them: the row's own fields, and an output to grade.
import { get } from "../../lib/api";
import { textOf, type Message } from "../../parts/messages";

export type Sample = { output: string; item: Record<string, unknown>; asked: string };

type Stored = { kind: string; messages?: Message[] | null; prompt?: string | null; completion?: string; item?: Record<string, unknown>; preferred?: Message[]; rejected?: Message[] };

export async function samplesOf(dataset: string, version: string, split: "train" | "validation" | "eval", count: number): Promise<Sample[]> {
  const { data } = await get("/api/v1/datasets/{name}/versions/{version}/rows", { name: dataset, version }, { split, limit: count });
  return (data as unknown as Stored[]).flatMap(samples);
}

function samples(row: Stored): Sample[] {
  const messages = row.messages ?? [];
  if (row.kind === "preference") {
    const asked = row.prompt ?? said(messages);
    return [row.preferred ?? [], row.rejected ?? []].map((answer) => ({ output: said(answer), item: {}, asked }));
  }
  if (row.kind === "completion") return [{ output: row.completion ?? "", item: {}, asked: row.prompt ?? "" }];
  const last = messages.at(-1);
  const answered = last?.role === "assistant";
  const answer = row.item?.answer ?? row.item?.reference ?? "";
  return [{ output: answered ? textOf(last!.content) : String(answer), item: row.item ?? {}, asked: said(answered ? messages.slice(0, -1) : messages) }];
}

function said(messages: readonly Message[]): string {
  return messages.map((message) => textOf(message.content)).join("\n");
}
