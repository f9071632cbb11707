// Which page is shown: the path of the address, `/runs/ID` for example, and its query.

class Router {
  path = $state(location.pathname);
  query = $state.raw(new URLSearchParams(location.search));

  constructor() {
    addEventListener("popstate", () => this.#read());
  }

  /** The parts of the path behind its slashes. */
  get parts(): string[] {
    return this.path.split("/").filter(Boolean).map(decoded);
  }

  /** `replace`: this page takes the place of the one before in the history; `stay`: what is in sight stays there. */
  go(address: string, { replace = false, stay = false } = {}): void {
    if (replace) history.replaceState(null, "", address);
    else if (address !== location.pathname + location.search) history.pushState(null, "", address);
    this.#read();
    if (!stay) scrollTo(0, 0);
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

  #read(): void {
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
