package httpapi_test

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"flashsale.dev/operator/reserver/httpapi"
	"flashsale.dev/operator/test/testmysql"
)

// With the shelf empty, a buyer who has nothing is refused from memory; one who has something is looked up.
func TestRefusalsNeedNoDatabase(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(1).In(t, store)
	elsewhere := pod(t, store, sale)
	server, _, metrics := podWithMetrics(t, store, sale, config(t))
	lookUps := func() (n float64) {
		t.Helper()
		families, err := metrics.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			if f.GetName() == "flashsale_look_ups_total" {
				return f.Metric[0].Counter.GetValue()
			}
		}
		t.Fatal("no such metric")
		return 0
	}
	wantKind(t, call(t, elsewhere, "POST", "/v1/reservations", "ann", ""), "201 HELD")
	testmysql.Eventually(t, "the pod knows that all is held", func() bool {
		return call(t, server, "GET", "/v1/stock", "", "").body["phase"] == "all-held"
	})
	testmysql.Eventually(t, "the pod knows the buyers", func() bool {
		before := lookUps()
		wantKind(t, call(t, server, "POST", "/v1/reservations", "bob", ""), "409 all-held")
		return lookUps() == before
	})
	before := lookUps()
	for range 50 {
		refused := call(t, server, "POST", "/v1/reservations", "bob", `{"quantity":1}`)
		wantKind(t, refused, "409 all-held")
		if refused.header.Get("Retry-After") == "" || refused.header.Get("Cache-Control") != "no-store" || refused.body["held"] != 1.0 || refused.body["nextExpiry"] == nil {
			t.Fatalf("refused from memory: %v %v", refused.header, refused.body)
		}
	}
	if n := lookUps() - before; n != 0 {
		t.Errorf("50 refusals took %v look-ups", n)
	}
	wantKind(t, call(t, server, "POST", "/v1/reservations", "ann", ""), "200 HELD")
	if n := lookUps() - before; n != 1 {
		t.Errorf("%v look-ups of one who holds something", n)
	}
}

// BenchmarkRefusal is the handler's part of telling one of a crowd that the shelf is empty.
func BenchmarkRefusal(b *testing.B) {
	store := testmysql.Store(b)
	sale := testmysql.Sale(1).In(b, store)
	api := httpapi.New(store, sale.ID, config(b), prometheus.NewRegistry(), slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { api.Run(ctx); close(done) }()
	defer func() { cancel(); <-done }()
	handler := api.Handler()
	do := func(buyer string) int {
		r := httptest.NewRequest(http.MethodPost, "/v1/reservations", strings.NewReader(`{"quantity":1}`))
		r.Header.Set("X-Buyer-Id", buyer)
		r.RemoteAddr = "127.0.0.1:1234"
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		return w.Code
	}
	testmysql.Eventually(b, "the pod is ready", func() bool { return api.Ready() == nil })
	if status := do("ann"); status != http.StatusCreated {
		b.Fatalf("status %d", status)
	}
	testmysql.Eventually(b, "the shelf is known to be empty", func() bool { return do("bob") == http.StatusConflict })
	r := httptest.NewRequest(http.MethodPost, "/v1/reservations", nil)
	r.Header.Set("X-Buyer-Id", "bob")
	r.RemoteAddr = "127.0.0.1:1234"
	w := &nowhere{header: http.Header{}}
	body := `{"quantity":1}`
	reader := strings.NewReader(body)
	r.Body = io.NopCloser(reader)
	r.ContentLength = int64(len(body))
	for b.Loop() {
		reader.Reset(body)
		handler.ServeHTTP(w, r)
	}
	b.ReportAllocs()
}

type nowhere struct{ header http.Header }

func (w *nowhere) Header() http.Header         { return w.header }
func (w *nowhere) Write(b []byte) (int, error) { return len(b), nil }
func (w *nowhere) WriteHeader(int)             {}
