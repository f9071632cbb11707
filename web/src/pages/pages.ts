// The pages, by the first part of their path.
import type { Component } from "svelte";

import Datasets from "./datasets/Datasets.svelte";
import Deployments from "./deployments/Deployments.svelte";
import Evaluations from "./evaluations/Evaluations.svelte";
import Graders from "./graders/Graders.svelte";
import Home from "./home/Home.svelte";
import Jobs from "./jobs/Jobs.svelte";
import Keys from "./keys/Keys.svelte";
import Labelling from "./labelling/Labelling.svelte";
import Playground from "./playground/Playground.svelte";
import Rollouts from "./rollouts/Rollouts.svelte";
import Runs from "./runs/Runs.svelte";
import Traces from "./traces/Traces.svelte";

export const PAGES: readonly { path: string; title: string; component: Component }[] = [
  { path: "", title: "Home", component: Home },
  { path: "runs", title: "Runs", component: Runs },
  { path: "rollouts", title: "Rollouts", component: Rollouts },
  { path: "jobs", title: "Jobs", component: Jobs },
  { path: "datasets", title: "Data sets", component: Datasets },
  { path: "evaluations", title: "Evaluations", component: Evaluations },
  { path: "graders", title: "Graders", component: Graders },
  { path: "deployments", title: "Deployments", component: Deployments },
  { path: "traces", title: "Traces", component: Traces },
  { path: "playground", title: "Playground", component: Playground },
  { path: "labelling", title: "Labelling", component: Labelling },
  { path: "keys", title: "Keys", component: Keys },
];
