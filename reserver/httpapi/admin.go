package httpapi

import (
	"errors"
	"net/http"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Admin serves /healthz, /readyz and /metrics, for the cluster only. It is alive from the start, and ready once it was
// told how to find out.
type Admin struct {
	Registry *prometheus.Registry
	ready    atomic.Pointer[func() error]
}

// SetReady says how to find out whether the process should get requests.
func (a *Admin) SetReady(ready func() error) { a.ready.Store(&ready) }

func (a *Admin) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case "/healthz":
		_, _ = w.Write([]byte("ok\n"))
	case "/readyz":
		err := errors.New("waiting for the database")
		if ready := a.ready.Load(); ready != nil {
			err = (*ready)()
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		_, _ = w.Write([]byte("ok\n"))
	case "/metrics":
		promhttp.HandlerFor(a.Registry, promhttp.HandlerOpts{}).ServeHTTP(w, r)
	default:
		http.NotFound(w, r)
	}
}
