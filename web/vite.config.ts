import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vite";

export default defineConfig({
  // The api serves what is built here under this path, and the page itself at every path of the dashboard.
  base: "/ui/",
  plugins: [svelte()],
  build: {
    outDir: "../bloomery/ui/dist",
    emptyOutDir: true,
    // The content security policy allows no scripts and no images that are written into the page.
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
  },
  // `npm run dev` beside a running server.
  server: { proxy: { "/api": "http://127.0.0.1:8700", "/v1": "http://127.0.0.1:8700" } },
});
