// Pointing at a request, or tapping it, lights it up in every chart and says what happened to it.
const story = document.getElementById("story");
if (story) {
  const idle = [...story.childNodes];
  const show = (target) => {
    const request = target?.dataset.request;
    for (const charts of document.querySelectorAll(".charts")) charts.classList.toggle("following", !!request);
    for (const lit of document.querySelectorAll("g.lit")) lit.classList.remove("lit");
    if (request) for (const cells of document.querySelectorAll(`g[data-request="${request}"]`)) cells.classList.add("lit");
    story.replaceChildren(...(request ? [target.querySelector("title").textContent] : idle));
  };
  for (const charts of document.querySelectorAll(".charts")) {
    charts.addEventListener("pointerover", (event) => show(event.target.closest("g[data-request]")));
    charts.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse") show(null); // a finger leaves when it is lifted
    });
  }
}
