// Which page is shown: the path of the address, `/runs/ID` for example, and its query.
import { unsaved } from "./unsaved.svelte";

const here = (): string => location.pathname + location.search;

class Router {
  path = $state(location.pathname);
  query = $state.raw(new URLSearchParams(location.search));
  /** The address of what is shown. */
  #shown = here();

  constructor() {
    addEventListener("popstate", () => {
      const wanted = here();
      if (wanted === this.#shown || !unsaved.any) return this.#read();
      // The browser has changed the address already: it is changed back until it is known whether that was meant.
      history.pushState(null, "", this.#shown);
      unsaved.leave(() => this.#go(wanted, { replace: true }));
    });
  }

  /** The parts of the path behind its slashes. */
  get parts(): string[] {
    return this.path.split("/").filter(Boolean).map(decoded);
  }

  /** `replace`: this page takes the place of the one before in the history; `stay`: what is in sight stays there. Who would lose what he wrote is asked first. */
  go(address: string, how: { replace?: boolean; stay?: boolean } = {}): void {
    unsaved.leave(() => this.#go(address, how));
  }

  /** Change the query in place: what was chosen on a page is in its address, so that it can be sent to somebody. */
  choose(chosen: Record<string, string | null>): void {
    const query = new URLSearchParams(location.search);
    for (const [name, value] of Object.entries(chosen)) {
      if (value === null || value === "") query.delete(name);
      else query.set(name, value);
    }
    const text = query.toString();
    history.replaceState(null, "", location.pathname + (text ? `?${text}` : ""));
    this.#read();
  }

  #go(address: string, { replace = false, stay = false }: { replace?: boolean; stay?: boolean }): void {
    if (replace) history.replaceState(null, "", address);
    else if (address !== here()) history.pushState(null, "", address);
    this.#read();
    if (!stay) scrollTo(0, 0);
  }

  #read(): void {
    this.#shown = here();
    this.path = location.pathname;
    this.query = new URLSearchParams(location.search);
  }
}

/** As it stands where it is no encoding: the address may be anybody's. */
function decoded(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

export const router = new Router();

/** For the whole document: a click on a link to a page of the dashboard changes the page without loading it anew. */
export function follow(event: MouseEvent): void {
  if (event.defaultPrevented || event.button !== 0 || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
  const link = (event.target as Element | null)?.closest?.("a");
  if (!link || link.target || link.hasAttribute("download") || link.origin !== location.origin || link.pathname.startsWith("/api/")) return;
  event.preventDefault();
  router.go(link.pathname + link.search);
}
