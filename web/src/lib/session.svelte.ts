// Who is logged in.
import type { Answer, Schema } from "../answers";
import { ownerOf, read, Refused, send, whenLoggedOut, word } from "./api";
import { live } from "./live.svelte";

type Login = Answer<"/api/v1/login">;

const RENEWED_EVERY_MS = 3_600_000;
const ENDED = "the login has ended: enter a key again";

class Session {
  /** Null: nobody. Undefined: not known yet. */
  login = $state<Login | null>();
  /** A key in the address that is not logged in: it is asked whether it should be. */
  offered = $state<{ key: string; name: string; project: string } | null>(null);
  /** Why the last login ended, could not begin, or could not be ended. */
  problem = $state("");

  /** Whose login this is, if it is anybody's. A key in the address, which does not stay there, logs nobody in unasked: any page may lead here. */
  async begin(): Promise<void> {
    const key = keyInAddress();
    if (key !== null) history.replaceState(null, "", location.pathname + location.search);
    whenLoggedOut(() => this.#end(ENDED));
    setInterval(() => this.login && void this.#renew(), RENEWED_EVERY_MS);
    // Where only what is behind the `#` is another, a browser stays on the page.
    addEventListener("hashchange", () => keyInAddress() !== null && location.reload());
    // Another tab has logged in or out.
    addEventListener("storage", (event) => event.key === word.name && void this.#renew());
    if (word.read()) await this.#renew();
    if (key !== null && !this.problem) await this.#offer(key);
    this.login ??= null;
  }

  async enter(key: string): Promise<void> {
    try {
      const { csrf, ...login } = (await (await send("POST", "/api/v1/login", { key })).json()) as Schema<"NewLogin">;
      word.keep(csrf);
      this.offered = null;
      // What is told from now on is told to this one.
      live.end();
      this.#show(login);
    } catch (error) {
      this.login ??= null;
      this.problem = (error as Error).message;
    }
  }

  /** The key of the address is not wanted. */
  stay(): void {
    this.offered = null;
    this.problem = "";
  }

  async leave(): Promise<void> {
    try {
      await send("DELETE", "/api/v1/login");
    } catch (error) {
      if (!over(error)) {
        this.problem = `still logged in: ${(error as Error).message}`;
        return;
      }
    }
    word.forget();
    this.#end("");
  }

  /** Who is logged in, now for longer. */
  async #renew(): Promise<void> {
    try {
      this.#show((await read("/api/v1/login")) as Login);
    } catch (error) {
      if (over(error)) this.#end(this.login ? ENDED : "");
      // A server that is away comes back, and the login is as good as before.
      else if (!this.login) this.problem = (error as Error).message;
    }
  }

  async #offer(key: string): Promise<void> {
    try {
      const owner = await ownerOf(key);
      if (owner.name !== this.login?.key || owner.project !== this.login.project) this.offered = { key, ...owner };
    } catch (error) {
      this.problem = `the key in the address: ${(error as Error).message}`;
    }
  }

  #show(login: Login): void {
    this.login = login;
    this.problem = "";
    live.begin();
  }

  #end(problem: string): void {
    live.end();
    this.login = null;
    this.offered = null;
    this.problem = problem;
  }
}

function keyInAddress(): string | null {
  return new URLSearchParams(location.hash.slice(1)).get("key");
}

/** Whether this says that nobody is logged in: by the cookie, or because the word is gone or another's. */
function over(error: unknown): boolean {
  return error instanceof Refused && error.nobody;
}

export const session = new Session();
