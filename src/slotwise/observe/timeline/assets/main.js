// The page, live or with an embedded log.
import { askForKey, attachControls, live, openLog } from "./controls.js";
import { Demo } from "./demo.js";
import { attachFocus } from "./focus.js";
import { $, Page } from "./page.js";
import { packed, Service } from "./service.js";

let question = null; // the open request for a key: one at a time
const service = new Service((wrong) => question ??= askForKey(wrong).finally(() => { question = null; }));
const page = new Page();
const demo = new Demo(service, page);
attachControls(page, demo);
attachFocus(page);
document.body.classList.toggle("framed", parent !== window); // beside a conversation
addEventListener("storage", ({ key }) => { if (key === "slotwise-theme") page.readTheme(); }); // of the page around
window.slotwise = page; // for inspection in the browser's console

// Behind a router: shows the replica that the address names, or the first, and offers the others.
async function choose() {
  const { replicas } = await service.json("/replicas");
  const named = new URLSearchParams(location.search).get("replica");
  const names = replicas.map((one) => one.name);
  service.replica = names.includes(named) ? named : (replicas.find((one) => one.is_up) ?? replicas[0]).name;
  $("replica").replaceChildren(...names.map((name) => new Option(name)));
  $("replica").value = service.replica;
  $("replica").closest("div").hidden = false;
  $("replica").addEventListener("change", ({ target }) => {
    location.search = new URLSearchParams({ replica: target.value });
  });
}

if ($("log")) openLog(page, packed($("log").textContent), $("log").dataset.name);
else if ($("router")) choose().then(() => live(page, service, demo), (error) => { $("said").textContent = error.message; });
else live(page, service, demo);
