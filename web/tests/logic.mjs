// What the dashboard computes before it shows anything, without a browser. `npm test` runs it; vite compiles the modules.
import assert from "node:assert/strict";
import { after, test } from "node:test";

import { createServer } from "vite";

// What a browser keeps for a page: here nothing.
globalThis.localStorage ??= { getItem: () => null, setItem: () => {}, removeItem: () => {} };

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

test("one of something is not several", async () => {
  const { several } = await load("lib/format.ts");
  assert.deepEqual([0, 1, 1200, null].map((count) => several(count, "token")), ["0 tokens", "1 token", "1,200 tokens", "– tokens"]);
});

test("what a request cost is told in figures that count", async () => {
  const { usd } = await load("lib/format.ts");
  assert.deepEqual([null, 0, 1234.567, 1, 0.0000767, 0.00000123, 2e-8].map(usd), ["–", "$0", "$1234.57", "$1.00", "$0.0000767", "$0.00000123", "$2.00e-8"]);
  assert.deepEqual([1.004, 0.99999, 0.9995, 0.9994, 0.999, 0.5, 0.07, 0.305, 0.001].map(usd), ["$1.00", "$1.00", "$1.00", "$0.999", "$0.999", "$0.50", "$0.07", "$0.305", "$0.001"]);
});

test("costs below each other have their points below each other", async () => {
  const { usdAlike } = await load("lib/format.ts");
  const said = (values) => values.map(usdAlike(values));
  assert.deepEqual(said([0.000003, 0.00000867, null, 0, 12.5]), ["$0.00000300", "$0.00000867", "–", "$0.00000000", "$12.50000000"]);
  assert.deepEqual(said([1, 0.5, 1234.567]), ["$1.00", "$0.50", "$1234.57"]);
  assert.deepEqual(said([]), []);
  assert.deepEqual(said([2e-8, 1e-12]), ["$0.00000002", "< $0.00000001"], "no more than there is room for");
  const { priceWords } = await load("pages/deployments/prices.ts");
  const price = { prompt_usd_per_mtok: 0.15, cached_prompt_usd_per_mtok: 0.03, completion_usd_per_mtok: 0.6 };
  assert.equal(priceWords(price), "$0.15 ($0.03 cached) + $0.60");
  assert.equal(priceWords({ prompt_usd_per_mtok: 1, cached_prompt_usd_per_mtok: null, completion_usd_per_mtok: 2 }, [price, { ...price, prompt_usd_per_mtok: 0.125 }, null]), "$1.000 + $2.000");
  assert.equal(priceWords(null, [price]), "no price");
});

test("what versions took to travel is told in all, beside their weights", async () => {
  const { GROUPS, ofGroup, others } = await load("pages/runs/measures.ts");
  const curve = (...y) => ({ x: y.map((_, step) => step), time: y.map((_, step) => step), y });
  const { total } = GROUPS.find(({ title }) => title === "Versions that travelled");
  assert.equal(total(new Map([["sync/bytes", curve(1024, null, 1024)], ["sync/whole_bytes", curve(4096, null, 4096)]])), "2.0 KiB of 8.0 KiB, 25 %");
  assert.equal(total(new Map()), "");
  const names = ["sync/bytes", "sync/whole_bytes", "sync/delta", "sync/changed", "sync/raw_bytes", "sync/tight_bytes", "sync/fast_bytes", "sync/fast_zstd_bytes", "sync/planes_bytes", "seconds/publishing", "sync/seconds"];
  assert.deepEqual(others(names), [], "each has its chart");
  assert.deepEqual(ofGroup(GROUPS.find(({ title }) => title === "Bytes by codec"), ["sync/tight_bytes"]), ["sync/tight_bytes"]);
});

test("what stays in sight keeps its row of the document, and what comes takes one that is left", async () => {
  const { Slots } = await load("parts/slots.ts");
  const slots = new Slots();
  assert.deepEqual(slots.give(["a", "b", "c", "d"]), [0, 1, 2, 3]);
  assert.deepEqual(slots.give(["c", "d", "e", "f"]), [2, 3, 0, 1]);
  assert.deepEqual(slots.give(["f", "c"]), [1, 2]);
  assert.deepEqual(slots.give(["x", "f", "y", "c", "z"]), [0, 1, 3, 2, 4]);
  assert.deepEqual(slots.give([]), []);
});

test("bins are called by the values in them", async () => {
  const { binNames } = await load("lib/bins.ts");
  assert.deepEqual(binNames({ low: 2, high: 2, width: 0, counts: [3] }), ["2"]);
  assert.deepEqual(binNames({ low: 1, high: 4, width: 1, counts: [1, 2, 0, 1] }), ["1", "2", "3", "4"]);
  assert.deepEqual(binNames({ low: 1, high: 5, width: 2, counts: [2, 2, 1] }), ["1 to 2", "3 to 4", "5"]);
  assert.deepEqual(binNames({ low: 0, high: 0.5, width: 0.25, counts: [1, 1] }), ["0 to 0.25", "0.25 to 0.5"]);
  assert.deepEqual(binNames({ low: 0, high: 2, width: 1, counts: [2, 1] }), ["0 to 1", "1 to 2"], "0, 0.5 and 2");
});

test("the card of a judge that counts is the latest of answers, or else of pairs", async () => {
  const { gateCard } = await load("lib/cards.ts");
  const [pairs, answers, older] = [{ id: 3, pairs: {} }, { id: 2, pairs: null }, { id: 1, pairs: null }];
  assert.equal(gateCard([pairs, answers, older]), answers);
  assert.equal(gateCard([pairs, { id: 0, pairs: {} }]), pairs);
  assert.equal(gateCard([]), undefined);
});

test("what is measured late of a step stands at that step, once", async () => {
  const { Measured } = await load("lib/points.ts");
  const measured = new Measured();
  const point = (step, values) => ({ step, created_us: step * 1e6, values });
  measured.add([point(1, { loss: 3 }), point(2, { loss: 2 }), point(3, { loss: null, "served/exact": 0.3 })]);
  const before = measured.curves;
  measured.add([point(2, { loss: 2 }), point(3, { loss: null, "served/exact": 0.3 })]);
  assert.equal(measured.curves, before, "the same again is no change");
  measured.add([point(2, { loss: 2, "served/exact": 0.2 }), point(3, { loss: 1 }), point(4, { loss: 0 })]);
  assert.notEqual(measured.curves, before);
  assert.deepEqual(measured.curves.get("served/exact"), { x: [2, 3], time: [2, 3], y: [0.2, 0.3] });
  assert.deepEqual(measured.curves.get("loss"), { x: [1, 2, 3, 4], time: [1, 2, 3, 4], y: [3, 2, 1, 0] });
});

test("times ascend even where a step was told of again", async () => {
  const { Measured } = await load("lib/points.ts");
  const measured = new Measured();
  measured.add([{ step: 1, created_us: 10e6, values: { loss: 1 } }, { step: 3, created_us: 30e6, values: { loss: 1 } }, { step: 2, created_us: 99e6, values: { loss: 1 } }]);
  assert.deepEqual(measured.curves.get("loss").time, [10, 30, 30]);
});

test("tokens a second are those between two reports, however many steps each told of", async () => {
  const { perSecond } = await load("lib/points.ts");
  const rate = perSecond({ x: [1, 2, 3, 4, 5], time: [10, 10, 12, 12, 16], y: [500, 700, 100, 300, 200] });
  assert.deepEqual(rate, { x: [4, 5], time: [12, 16], y: [200, 50] });
  const { withRate } = await load("pages/runs/measures.ts");
  const tokens = { x: [1, 2], time: [0, 2], y: [10, 10] };
  assert.deepEqual([...withRate(new Map([["tokens", tokens]])).values()].at(-1).y, [5]);
  const measured = new Map([["tokens", tokens], ["tokens/trained_per_s", tokens]]);
  assert.equal(withRate(measured), measured);
});

test("of the steps that are kept the nearest is found", async () => {
  const { nearest } = await load("lib/points.ts");
  assert.deepEqual([0, 1, 3, 3.6, 99].map((step) => nearest([1, 2, 5, 9], step)), [1, 1, 2, 5, 9]);
});

test("lines stand on those behind them that are shown, and what is not there is nothing", async () => {
  const { piled } = await load("lib/points.ts");
  const lines = [[1, 2], [10, undefined], [100, null]];
  assert.deepEqual(piled(lines, () => true), [[111, 2], [110, 0], [100, 0]]);
  assert.deepEqual(piled(lines, (place) => place !== 1), [[101, 2], [100, 0], [100, 0]]);
  assert.deepEqual(piled([], () => true), []);
});

test("the ends of an interval are drawn with what they are of, and alone where that is not there", async () => {
  const { GROUPS, ofGroup, others } = await load("pages/runs/measures.ts");
  const parts = GROUPS.find(({ title }) => title === "Reward by component");
  assert.deepEqual(ofGroup(parts, ["reward/part/a", "reward/part/a_low", "reward/part/a_high", "reward/part/b_low"]), ["reward/part/a", "reward/part/b_low"]);
  assert.deepEqual(others(["x", "x_low", "x_high", "y_low", "y_high", "z", "z_low"]), ["x", "y_high", "y_low", "z", "z_low"]);
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

test("pairs of an evaluation that is still running have every row once", async () => {
  const { pairsOf } = await load("pages/evaluations/pairs.ts");
  const side = { key: "k", title: "t", evaluation: "e", model: "m" };
  const rows = Array.from({ length: 1200 }, (_, row) => ({ row }));
  const asked = [];
  globalThis.fetch = async (url) => {
    const offset = Number(new URL(url, "http://here").searchParams.get("offset"));
    asked.push(offset);
    const data = rows.slice(offset, offset + 500);
    const has_more = offset + data.length < rows.length;
    // The last row is first from now on.
    rows.unshift(rows.pop());
    return Response.json({ data, has_more });
  };
  const found = (await pairsOf(side, null, "g", "all")).rows.map(({ row }) => row);
  assert.deepEqual(asked, [0, 500, 1000]);
  assert.deepEqual(found, Array.from({ length: 1198 }, (_, row) => row));
});

test("keys show half as much, twice as much, what is beside it and all, and never what is not there", async () => {
  const { keyed } = await load("lib/span.ts");
  const whole = { min: 0, max: 64 };
  const by = (...keys) => keys.reduce((shown, key) => keyed(key, shown, whole, 4) ?? shown, whole);
  assert.deepEqual(by("+"), { min: 16, max: 48 });
  assert.deepEqual(by("+", "="), { min: 24, max: 40 });
  assert.deepEqual(by("+", "+", "-"), by("+"));
  assert.deepEqual(by("+", "ArrowRight"), { min: 24, max: 56 });
  assert.deepEqual(by("+", "ArrowRight", "ArrowRight", "ArrowRight"), { min: 32, max: 64 });
  assert.deepEqual(by("+", "ArrowLeft", "ArrowLeft", "ArrowLeft", "-"), whole);
  assert.deepEqual(by("+", "ArrowLeft", "ArrowLeft", "+"), { min: 8, max: 24 });
  assert.deepEqual(by("+", "+", "+", "+", "+", "+"), { min: 30, max: 34 });
  for (const key of ["0", "Home"]) assert.deepEqual(by("+", "ArrowRight", key), whole);
  for (const key of ["-", "0", "Home", "ArrowLeft", "ArrowRight", "x"]) assert.equal(keyed(key, whole, whole, 4), undefined, key);
  assert.equal(keyed("+", { min: 5, max: 5 }, { min: 5, max: 5 }, 0), undefined);
});

test("pairs on which judges disagree come first, and whose answer is shown first says nothing", async () => {
  const { pairs } = await load("pages/labelling/queue.ts");
  const item = (row, model, scores) => ({
    number: 0, row, sample: 0, model, messages: [{ role: "user", content: "?" }], prompt: null, item: {}, created_us: 0,
    answer: { text: `${model} ${row}` },
    scores: scores.map((score, place) => ({ grader: `judge-${place}`, passed: null, result: { score } })),
  });
  const rows = Array.from({ length: 40 }, (_, row) => row);
  // Of every tenth row one judge prefers one answer and the other judge the other.
  const items = rows.flatMap((row) => [item(row, "a", [1, row % 10 ? 1 : 0]), item(row, "b", [0, row % 10 ? 0 : 1])]);
  const queue = pairs(items, "a", "b");
  assert.deepEqual(queue.slice(0, 4).map(({ first }) => first.row % 10), [0, 0, 0, 0]);
  assert.deepEqual(queue.map(({ spread }) => spread), [...Array(4).fill(1), ...Array(36).fill(0)]);
  const first = queue.filter(({ first }) => first.model === "a").length;
  assert.ok(first > 8 && first < 32, `of 40 pairs ${first} show the same model first`);
  assert.deepEqual(pairs(items.toReversed(), "b", "a").map(({ id, first }) => [id, first.model]).sort(), queue.map(({ id, first }) => [id, first.model === "a" ? "b" : "a"]).sort());
});

test("of every process it is told whether it is well, and what it proved", async () => {
  const { processesOf } = await load("pages/home/processes.ts");
  const engine = (base, given = {}) => ({ base_hash: base, aliases: [`of-${base}`], ready: true, stands_in: false, detail: {}, ...given });
  const replica = (name, given = {}) => ({ name, base_hash: "a", ready: true, wanted: true, serves: "production", detail: {}, ...given });
  const detail = {
    proved: { root: "f00d", probe_max_abs: 0 },
    proved_versions: { x: { probe: { max_abs: 0.25 } }, y: { probe: null } },
    scrub_rounds: 1,
    condemned: { "0123456789abcdef": {} },
  };
  const status = {
    engines: [engine("a"), engine("b", { detail }), engine("c", { ready: false }), engine("d", { stands_in: true })],
    replicas: [replica("one"), replica("two"), replica("three", { ready: false }), replica("four", { ready: false, wanted: false })],
  };
  const shown = processesOf(status, { replicas: { silent: ["two", "five"] }, runners: ["jobs"] });
  assert.deepEqual(
    shown.map(({ name, state, serves }) => [name, state, serves]),
    [
      ["engine of of-a", "ready", "training"],
      ["engine of of-b", "ready", "training, production"],
      ["engine of of-c", "starting", "training, production"],
      ["engine of of-d", "stands in", "training, production"],
      ["one", "ready", "production"],
      ["two", "silent", "production"],
      ["three", "starting", "production"],
      ["four", "not needed", "production"],
      ["five", "silent", ""],
      ["runner jobs", "ready", "jobs"],
    ],
  );
  const { root, answers, versions, checked, condemned } = shown[1];
  assert.deepEqual({ root, answers, versions, checked, condemned }, { root: "f00d", answers: "equal bits", versions: "2, answers within 0.25 nats", checked: "1 time", condemned: "0123456789ab" });
});

test("traffic is drawn up to now, minute by minute", async () => {
  const { perMinute } = await load("pages/deployments/traffic.ts");
  const span = (minute) => ({ started_us: minute * 60e6 + 1, in_tokens: 3, out_tokens: 2 });
  const drawn = perMinute([span(1000), span(1000), span(1002)], 1030);
  assert.deepEqual([drawn.x[0], drawn.x.at(-1), drawn.x.length], [1000 * 60, 1030 * 60, 31]);
  assert.deepEqual(drawn.requests, [2, 0, 1, ...Array(28).fill(0)]);
  assert.deepEqual(drawn.tokens.slice(0, 3), [10, 0, 5]);
  assert.equal(perMinute([span(1000)], 1005).x.length, 16, "a quarter of an hour at least");
  assert.equal(perMinute([span(1000)], 9000).x.length, 1441, "a day at most");
  assert.equal(perMinute([span(1000)], 998).x.at(-1), 1000 * 60, "a server whose clock is ahead");
  assert.deepEqual(perMinute([], 1000).x, []);
});

test("a grader that is tried is given of a row what an evaluation gives it", async () => {
  const { samples } = await load("pages/graders/samples.ts");
  const [asked, answer] = [{ role: "user", content: "?" }, { role: "assistant", content: "yes" }];
  assert.deepEqual(samples({ kind: "chat", messages: [asked, answer] }), [{ output: "yes", item: { messages: [asked], reference: "yes", answer }, asked: "?" }]);
  assert.deepEqual(samples({ kind: "completion", prompt: "a", completion: "b" }), [{ output: "b", item: { prompt: "a", completion: "b", reference: "b" }, asked: "a" }]);
  assert.deepEqual(samples({ kind: "prompt", messages: [asked], item: { answer: 4 } }), [{ output: "4", item: { answer: 4 }, asked: "?" }]);
});

test("a version says where its rows come from", async () => {
  const { madeBy } = await load("pages/datasets/sets.ts");
  const first = { id: "a", manifest: "m", number: 1, parent: null, recipe: { kind: "import", format: "jsonl" } };
  const saved = { id: "b", manifest: "n", number: 2, parent: "a", recipe: { kind: "import", format: "jsonl", origin: "the playground" } };
  assert.deepEqual([first, saved].map((version) => madeBy(version, [first, saved])), ["jsonl file", "from the playground, added to version 1"]);
});

test("of evidence what is known is said in words, and what is not is kept as it was given", async () => {
  const { citable, comparisons, differing, evidenceOf, told } = await load("pages/deployments/evidence.ts");
  const mean = { value: 0.5, interval: [0.25, 0.75] };
  const model = (name, version, means) => ({ model: name, version, graders: means.map((mean) => ({ grader: "right@1", rows: 8, mean, passed: null, hash: "h" })) });
  const evaluations = [
    { id: "e2", spec: { name: "second" }, result: { models: [model("front", "v1", [mean]), model("base", "v0", [mean])] } },
    { id: "e1", spec: { name: "first" }, result: { models: [model("v1", "v1", [null])] } },
    { id: "e0", spec: { name: "ended early" }, result: null },
  ];
  const cited = citable(evaluations, "v1");
  assert.deepEqual(cited, [
    { evaluation: "e2", name: "second", model: "front", scores: [{ grader: "right@1", rows: 8, mean }] },
    { evaluation: "e1", name: "first", model: "v1", scores: [] },
  ]);
  const compared = (name, difference_interval) => ({ name, rows: 8, before: 3, after: 0.5, before_interval: [2.5, 3.5], after_interval: null, difference: -2.5, difference_interval, higher_is_better: false });
  const ended = (id, version, ...measures) => ({ id, spec: { name: `job ${id}` }, result: version && { version, base_version: "v0", compared: measures } });
  const jobs = comparisons([ended("j4", null), ended("j3", "v1", compared("loss", [-3, -2]), compared("exact", null)), ended("j2", "v2", compared("loss", null)), ended("j1", "v1")], "v1");
  assert.deepEqual(jobs, [{ job: "j3", name: "job j3", base_version: "v0", compared: [compared("loss", [-3, -2]), compared("exact", null)] }], "of these weights alone, where anything was compared");
  assert.equal(differing(jobs[0]), "loss 3 before, 0.5 after, a difference of -2.5 (-3 to -2) on 8 rows; exact 3 before, 0.5 after, a difference of -2.5 on 8 rows");
  assert.deepEqual(evidenceOf([], []), {}, "no evidence is none");
  assert.deepEqual(told(evidenceOf(cited, [])), { evaluations: cited, jobs: [], words: [], rest: {} });
  assert.deepEqual(told(evidenceOf(cited, jobs)), { evaluations: cited, jobs, words: [], rest: {} });
  const split = { gained: 2, lost: 1, p_value: 0.5 };
  assert.deepEqual(told({ mcnemar: split }).rest, {});
  assert.deepEqual(told({ mcnemar: { ...split, rows: 9 } }).rest, { mcnemar: { ...split, rows: 9 } }, "nothing that was given is left out");
  for (const odd of [[{ ...cited[0], by: "me" }], [null], [{}], [{ ...cited[0], scores: [{ grader: "right@1", rows: 8, mean: { value: 0.5, interval: [0.25] } }] }], { 0: cited[0] }]) {
    assert.deepEqual(told({ evaluations: odd }), { evaluations: [], jobs: [], words: [], rest: { evaluations: odd } });
  }
  for (const odd of [[{ ...jobs[0], by: "me" }], [null], [{ ...jobs[0], compared: [{ ...compared("loss", [1]) }] }], [{ ...jobs[0], compared: [{ ...compared("loss", null), p_value: 0 }] }], { 0: jobs[0] }]) {
    assert.deepEqual(told({ jobs: odd }), { evaluations: [], jobs: [], words: [], rest: { jobs: odd } });
  }
  assert.deepEqual(told({ evaluations: "e2", jobs: 3 }).words, ["evaluations: e2", "jobs: 3"]);
  assert.deepEqual(told({ mcnemar: { gained: 2 }, why: "better", n: 1234567, long: "x".repeat(201), lines: "a\nb", list: [1], nothing: null }), { evaluations: [], jobs: [], words: ["why: better", "n: 1234567"], rest: { mcnemar: { gained: 2 }, long: "x".repeat(201), lines: "a\nb", list: [1], nothing: null } });
});

test("figures of traffic say of which requests they are, and what time those cover", async () => {
  const { covered } = await load("pages/deployments/traffic.ts");
  const spans = [200, 140, 80].map((seconds) => ({ started_us: seconds * 1e6 }));
  assert.equal(covered(spans, 4, 300_000), "all 3 requests on record, which came within 2 min 0 s, the first of them 3 min ago");
  assert.equal(covered(spans, 3, 300_000), "the last 3 requests alone, which came within 2 min 0 s, the first of them 3 min ago");
  assert.equal(covered(spans.slice(0, 1), 3, 300_000), "the one request on record, 1 min ago");
});
