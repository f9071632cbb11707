// Rows of a data set as a grader sees them, which are those of an evaluation: the row's fields, and an output to grade.
import { get } from "../../lib/api";
import { textOf, type Message } from "../../parts/messages";

export type Sample = { output: string; item: Record<string, unknown>; asked: string };

type Stored = { kind: string; messages?: Message[] | null; prompt?: string | null; completion?: string; item?: Record<string, unknown>; preferred?: Message[]; rejected?: Message[] };

export async function samplesOf(dataset: string, version: string, split: "train" | "validation" | "eval", count: number): Promise<Sample[]> {
  const { data } = await get("/api/v1/datasets/{name}/versions/{version}/rows", { name: dataset, version }, { split, limit: count });
  return (data as unknown as Stored[]).flatMap(samples);
}

export function samples(row: Stored): Sample[] {
  const messages = row.messages ?? [];
  switch (row.kind) {
    case "preference": {
      const asked = row.prompt ?? said(messages);
      return [row.preferred ?? [], row.rejected ?? []].map((answer) => ({ output: said(answer), item: {}, asked }));
    }
    case "completion": {
      const { prompt = "", completion = "" } = row;
      return [{ output: completion, item: { prompt, completion, reference: completion }, asked: prompt ?? "" }];
    }
    case "chat": {
      const [asked, answer] = [messages.slice(0, -1), messages.at(-1)];
      const reference = textOf(answer?.content);
      return [{ output: reference, item: { messages: asked, reference, answer }, asked: said(asked) }];
    }
    default: {
      const item = row.item ?? {};
      return [{ output: textOf(item.reference ?? item.answer), item, asked: said(messages) }];
    }
  }
}

function said(messages: readonly Message[]): string {
  return messages.map((message) => textOf(message.content)).join("\n");
}
