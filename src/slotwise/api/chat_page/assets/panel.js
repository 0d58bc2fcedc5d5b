// The timeline beside the conversation.
import { $, make } from "./dom.js";
import { addressOf } from "./service.js";

export class Panel {
  constructor() {
    this.frame = null;
    this.count = 0; // of the requests shown: an address that changes is an address that is read again
    this.replica = "";
  }

  get isOpen() { return !$("panel").hidden; }

  // Opens the panel, or closes it.
  toggle(open = !this.isOpen) {
    $("panel").hidden = !open;
    document.body.classList.toggle("panelled", open);
    $("timeline").setAttribute("aria-pressed", String(open));
    if (open && !this.frame) this.#load("");
    if (!open) this.close();
  }

  // A frame that is not seen would follow the server's events all the same.
  close() {
    this.frame?.remove();
    this.frame = null;
  }

  // Points at a request, in an open panel.
  point({ id, replica }) {
    if (this.isOpen && id) this.#load(id, replica);
  }

  show(facts) {
    if (!this.isOpen) {
      $("panel").hidden = false;
      document.body.classList.add("panelled");
      $("timeline").setAttribute("aria-pressed", "true");
    }
    this.point(facts);
  }

  #load(id, replica = "") {
    const query = replica ? `?${new URLSearchParams({ replica })}` : "";
    const place = id ? `#${new URLSearchParams({ request: id, n: ++this.count })}` : "";
    if (this.frame && this.replica !== replica) this.close();
    this.replica = replica;
    if (this.frame) {
      this.frame.src = addressOf("/timeline") + query + place;
      return;
    }
    this.frame = make("iframe", { title: "The batch, step by step", src: addressOf("/timeline") + query + place });
    $("panel").append(this.frame);
  }
}
