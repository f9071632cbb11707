// What the dashboard computes before it shows anything, without a browser. `npm test` runs it; vite compiles the modules.
import assert from "node:assert/strict";
import { after, test } from "node:test";

import { createServer } from "vite";

const vite = await createServer({ server: { middlewareMode: true, hmr: false, ws: false, watch: null }, appType: "custom", optimizeDeps: { noDiscovery: true, include: [] }, logLevel: "error" });
const load = (path) => vite.ssrLoadModule(`/src/${path}`);

after(() => vite.close());

test("a number never claims more than it is", async () => {
  const { duration, percent } = await load("lib/format.ts");
  assert.deepEqual([1, 0.99999, 0.9996, 0.5, 0, null].map(percent), ["100 %", "99.9 %", "99.9 %", "50 %", "0 %", "–"]);
  assert.deepEqual(
    [0.0005, 0.0009999, 0.9994, 0.9996, 59.94, 59.97, 119.6, 3599.7, 7260].map(duration),
    ["500 µs", "1 ms", "999 ms", "1 s", "59.9 s", "1 min 0 s", "2 min 0 s", "1 h 0 min", "2 h 1 min"],
  );
});

test("a form begins with every field of an object, and names with dots stay names", async () => {
  const { nested, Schemas } = await load("lib/schema.ts");
  const schemas = new Schemas({
    components: {
      schemas: {
        Spec: {
          type: "object",
          properties: {
            method: { discriminator: { propertyName: "kind", mapping: { sft: "#/components/schemas/Sft" } } },
            begin: { anyOf: [{ $ref: "#/components/schemas/Begin" }, { type: "null" }] },
            metadata: { type: "object", additionalProperties: { type: "string" } },
          },
        },
        Sft: { type: "object", properties: { kind: { const: "sft" }, layers: { type: "array" } } },
        Begin: { type: "object", properties: { job: { type: "string" } } },
      },
    },
  });
  const spec = { method: { kind: "sft", layers: [1, 2] }, begin: { job: "job_1" }, metadata: { "team.name": "a", plain: "b" } };
  const fields = schemas.flattened(schemas.named("Spec"), spec);
  assert.deepEqual(fields.map(([path]) => path), ["method.kind", "method.layers", "begin.job", "metadata"]);
  assert.deepEqual(nested(new Map(fields)), spec);
  assert.deepEqual(schemas.flattened(schemas.named("Spec"), { begin: null }), [["begin", null]]);
});

test("a list that moves while it is read has every row once, and none is left out", async () => {
  const { getAll } = await load("lib/api.ts");
  const rows = Array.from({ length: 1200 }, (_, place) => ({ id: `row_${place}` }));
  const asked = [];
  globalThis.fetch = async (url) => {
    const query = new URL(url, "http://here").searchParams;
    const offset = Number(query.get("offset"));
    asked.push(offset);
    const data = rows.slice(offset, offset + Number(query.get("limit")));
    rows.unshift({ id: `new_${asked.length}` });
    return Response.json({ data, has_more: offset + data.length < rows.length - 1 });
  };
  const ids = (await getAll("/api/v1/jobs")).map(({ id }) => id);
  assert.equal(new Set(ids).size, ids.length);
  assert.deepEqual(ids, Array.from({ length: 1200 }, (_, place) => `row_${place}`));
  assert.deepEqual(asked, [0, 500, 1000]);
});
