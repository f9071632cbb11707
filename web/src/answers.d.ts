// What the API takes and answers, by its route: a route that is gone, or answers something else, fails `npm run check` where the dashboard reads it.
import type { components, paths } from "./api";

/** The JSON that `GET` of a route answers with. */
export type Answer<Route extends keyof paths> = paths[Route] extends { get: { responses: { 200: { content: { "application/json": infer Body } } } } }
  ? Body
  : never;

/** A row of a route that answers with a page of them. */
export type Row<Route extends keyof paths> = Answer<Route> extends { data: (infer Each)[] } ? Each : never;

/** A part of the document, by its name. */
export type Schema<Name extends keyof components["schemas"]> = components["schemas"][Name];
