"use strict";
// Browsers start no worker from a page that was opened from a disk, and the search is a worker. There it runs in a hidden
// frame instead, which takes the same messages.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.title = "search";
      document.documentElement.append(this.frame);
      const inner = this.frame.contentWindow;
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inner.importScripts = () => {};
      this.ready = new Promise((done) => {
        const script = this.frame.contentDocument.createElement("script");
        script.src = new URL(url, location.href).href;
        script.onload = () => done(inner);
        this.frame.contentDocument.documentElement.append(script);
      });
    }
    postMessage(data) {
      this.ready.then((inner) => inner.dispatchEvent(new inner.MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
