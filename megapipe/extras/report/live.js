const perfetto = "https://ui.perfetto.dev", parts = page => [...page.body.children].map(each => each.outerHTML);
let shown = parts(document), last = "";
function replaced(old, fresh) {
  const inside = each => each.querySelectorAll("details, .scroll, pre"), olds = inside(old), news = inside(fresh);
  if (olds.length === news.length) olds.forEach((each, i) => { news[i].open = each.open; });
  const places = [...olds].map(each => each.scrollLeft);
  old.replaceWith(fresh);
  if (olds.length === news.length) places.forEach((left, i) => { news[i].scrollLeft = left; });
}
async function fetched() {
  const answer = await fetch("/", {cache: "no-cache"}), text = await answer.text();
  if (!answer.ok) return text;
  if (text !== last) {
    const page = new DOMParser().parseFromString(text, "text/html"), next = parts(page), y = scrollY;
    const fresh = [...page.body.children], old = [...document.body.children];
    if (next.length === shown.length) next.forEach((each, i) => { if (each !== shown[i]) replaced(old[i], fresh[i]); });
    else document.body.replaceChildren(...fresh);
    [shown, last] = [next, text];
    leave();
    scrollTo(0, y);
  }
  return "updates itself";
}
async function update() {
  const begun = performance.now();
  if (!document.hidden) {
    const text = await fetched().catch(() => "no longer updated: megapipe report does not answer");
    document.querySelector(".live").textContent = text;
  }
  setTimeout(update, Math.max(2000, 4 * (performance.now() - begun)));
}
update();
async function handed(button) {
  const say = text => { button.nextElementSibling.textContent = text; }, other = window.open(perfetto);
  if (!other) return say("The browser blocked the new window; allow it for this page.");
  say("Waiting for Perfetto.");
  const answer = await fetch("/trace");
  if (!answer.ok) return say(await answer.text());
  const buffer = await answer.arrayBuffer(), name = button.dataset.trace, begun = performance.now();
  const given = event => {
    if (event.source !== other || event.origin !== perfetto || event.data !== "PONG") return;
    end("Opened in the other window.");
    other.postMessage({perfetto: {buffer, title: name, fileName: name}}, perfetto);
  };
  const end = text => { clearInterval(pings); removeEventListener("message", given); say(text); };
  const pings = setInterval(() => {
    if (other.closed) end("");
    else if (performance.now() - begun > 60000) end("Perfetto does not answer; save the trace and open the file there.");
    else other.postMessage("PING", perfetto);
  }, 200);
  addEventListener("message", given);
}
document.addEventListener("click", event => {
  const button = event.target.closest("[data-trace]");
  if (button) handed(button).catch(() => { button.nextElementSibling.textContent = "megapipe report does not answer."; });
});
