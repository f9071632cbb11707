// Who is logged in.
import type { Answer } from "../answers";
import { identify, Refused, send } from "./api";
import { live } from "./live.svelte";

type Login = Answer<"/api/v1/login">;

class Session {
  /** Null: nobody. Undefined: not known yet. */
  login = $state<Login | null>();
  /** Why the last login ended, or could not begin. */
  problem = $state("");

  /** Whose cookie this is, if it is anybody's; a key in the address comes first, and does not stay there. */
  async begin(): Promise<void> {
    const key = new URLSearchParams(location.hash.slice(1)).get("key");
    if (key !== null) {
      history.replaceState(null, "", location.pathname + location.search);
      return this.enter(key);
    }
    await this.#ask("GET");
  }

  async enter(key: string): Promise<void> {
    await this.#ask("POST", { key });
  }

  async leave(): Promise<void> {
    await send("DELETE", "/api/v1/login").catch(() => undefined);
    this.#end("");
  }

  async #ask(method: "GET" | "POST", body?: { key: string }): Promise<void> {
    try {
      const login = (await (await send(method, "/api/v1/login", body)).json()) as Login;
      identify(login.csrf, () => this.#end("the login has ended: enter a key again"));
      this.login = login;
      this.problem = "";
      live.begin();
    } catch (error) {
      const nobody = error instanceof Refused && error.status === 401 && method === "GET";
      this.#end(nobody ? "" : (error as Error).message);
    }
  }

  #end(problem: string): void {
    live.end();
    this.login = null;
    this.problem = problem;
  }
}

export const session = new Session();
