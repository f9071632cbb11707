// Forms from the published document: which fields there are, of what kind, and what is said of them.
import { read } from "./api";

export type Schema = {
  type?: string;
  description?: string;
  default?: unknown;
  const?: unknown;
  enum?: readonly (string | number)[];
  properties?: Record<string, Schema>;
  additionalProperties?: boolean | Schema;
  anyOf?: readonly Schema[];
  discriminator?: { propertyName: string; mapping: Record<string, string> };
  $ref?: string;
};

export type Document = { components: { schemas: Record<string, Schema> } };

let known: Promise<Document> | undefined;

/** The document, fetched once. */
export function published(): Promise<Document> {
  known ??= read("/api/v1/openapi.json") as Promise<Document>;
  known.catch(() => (known = undefined));
  return known;
}

export class Schemas {
  constructor(readonly document: Document) {}

  /** A part by its name; of what is taken as well as answered there are two. */
  named(name: string): Schema {
    const schemas = this.document.components.schemas;
    return schemas[`${name}-Input`] ?? schemas[name] ?? {};
  }

  /** What a reference leads to, with what is said where it stands. */
  followed(schema: Schema): Schema {
    if (!schema.$ref) return schema;
    const found = this.document.components.schemas[schema.$ref.split("/").at(-1)!] ?? {};
    const { $ref: _, ...beside } = schema;
    return { ...found, ...beside };
  }

  /** A field without the null that it may be, and whether it may. */
  field(schema: Schema): { schema: Schema; nullable: boolean } {
    const { anyOf, ...beside } = schema;
    if (!anyOf) return { schema: this.followed(schema), nullable: false };
    const others = anyOf.filter((each) => each.type !== "null");
    const nullable = others.length < anyOf.length;
    return others.length === 1 ? { schema: { ...this.followed(others[0]!), ...beside }, nullable } : { schema, nullable };
  }

  /** The kinds that a field may be of, by the word that says which. */
  kinds(schema: Schema): Map<string, Schema> {
    const mapping = schema.discriminator?.mapping ?? {};
    return new Map(Object.entries(mapping).map(([kind, reference]) => [kind, this.followed({ $ref: reference })]));
  }

  /** The paths and values of every field of an object, for a form that begins with them. What has no fields of its own is one value, whatever its keys are. */
  flattened(schema: Schema, whole: unknown, path = ""): [string, unknown][] {
    if (whole === null || typeof whole !== "object") return [[path, whole]];
    const parts = whole as Record<string, unknown>;
    const { properties } = this.kinds(schema).get(String(parts[schema.discriminator?.propertyName ?? ""])) ?? schema;
    if (!properties) return [[path, whole]];
    return Object.entries(parts).flatMap(([name, part]) => this.flattened(this.field(properties[name] ?? {}).schema, part, path ? `${path}.${name}` : name));
  }
}

/** What was chosen, by the path of its field. */
export type Chosen = ReadonlyMap<string, unknown>;

/** One object of everything that was chosen. */
export function nested(chosen: Chosen): Record<string, unknown> {
  const whole: Record<string, unknown> = {};
  for (const [path, value] of chosen) {
    if (value === undefined) continue;
    const names = path.split(".");
    let part = whole;
    for (const name of names.slice(0, -1)) part = (part[name] ??= {}) as Record<string, unknown>;
    const last = names.at(-1)!;
    part[last] = value !== null && typeof value === "object" && !Array.isArray(value) ? { ...value, ...((part[last] as object | undefined) ?? {}) } : value;
  }
  return whole;
}

/** What is at a path of an object. */
export function at(whole: unknown, path: string): unknown {
  return path.split(".").reduce<unknown>((part, name) => (part !== null && typeof part === "object" ? (part as Record<string, unknown>)[name] : undefined), whole);
}

/** A field's name as words. */
export function words(name: string): string {
  const text = name.replaceAll("_", " ");
  return text.charAt(0).toUpperCase() + text.slice(1);
}
