/* Search from the disk: browsers start no workers for file: addresses, so that the worker of the search runs in a hidden
   frame instead. Pages from a server are left alone. */
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      const inside = frame.contentWindow
      const load = address => new Promise((resolve, reject) => {
        const script = inside.document.createElement("script")
        script.src = address
        script.onload = resolve
        script.onerror = reject
        inside.document.body.appendChild(script)
      })
      inside.importScripts = (...addresses) => addresses.reduce((last, next) => last.then(() => load(next)), Promise.resolve())
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.frame = frame
      this.ready = load(url)
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
        .catch(() => this.dispatchEvent(new Event("error")))
    }
    terminate() {
      this.frame.remove()
    }
  }
  window.Worker = window.IFrameWorker
}
