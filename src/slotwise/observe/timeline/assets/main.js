// The page, live or with an embedded log.
import { askForKey, attachControls, live, openLog } from "./controls.js";
import { Demo } from "./demo.js";
import { $, Page } from "./page.js";
import { packed, Service } from "./service.js";

let question = null; // the open request for a key: one at a time
const service = new Service((wrong) => question ??= askForKey(wrong).finally(() => { question = null; }));
const page = new Page();
const demo = new Demo(service, page);
attachControls(page, demo);
window.slotwise = page; // for inspection in the browser's console
if ($("log")) openLog(page, packed($("log").textContent), $("log").dataset.name);
else live(page, service, demo);
