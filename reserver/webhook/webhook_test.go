package webhook

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"

	"flashsale.dev/operator/reserver/inventory"
	"flashsale.dev/operator/test/testmysql"
)

const secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"

var ctx = context.Background()

// shop is a webhook that checks signatures, and keeps what it was told.
type shop struct {
	*httptest.Server
	mu      sync.Mutex
	broken  bool
	refused string // an event with this in it is refused for ever
	asked   int
	events  map[string]cloudEvent
	counts  map[string]int // deliveries by type
}

func newShop(t *testing.T) *shop {
	s := &shop{events: map[string]cloudEvent{}, counts: map[string]int{}}
	verifier, err := standardwebhooks.NewWebhook(secret)
	if err != nil {
		t.Fatal(err)
	}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		s.asked++
		if s.broken || s.refused != "" && bytes.Contains(body, []byte(s.refused)) {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		if err := verifier.Verify(body, r.Header); err != nil {
			t.Errorf("the signature is wrong: %v", err)
		}
		var e cloudEvent
		if err := json.Unmarshal(body, &e); err != nil {
			t.Error(err)
		}
		if e.SpecVersion != "1.0" || e.ID != r.Header.Get("webhook-id") || r.Header.Get("Content-Type") != "application/cloudevents+json; charset=utf-8" {
			t.Errorf("not a CloudEvent: %s, %v", body, r.Header)
		}
		s.events[e.ID] = e
		s.counts[e.Type]++
		w.WriteHeader(http.StatusNoContent)
	}))
	t.Cleanup(s.Close)
	return s
}

func (s *shop) setBroken(broken bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.broken = broken
}

// kinds counts the distinct events by type.
func (s *shop) kinds() map[string]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := map[string]int{}
	for _, e := range s.events {
		n[e.Type]++
	}
	return n
}

func publish(t *testing.T, store *inventory.Store, sale inventory.Sale, url string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(file, []byte(secret+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	p := &Publisher{Store: store, Sale: sale.ID, URL: url, SecretFile: file, Log: slog.New(slog.DiscardHandler)}
	running, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() { p.Run(running, prometheus.NewRegistry()) })
	t.Cleanup(func() { stop(); wg.Wait() })
}

func claim(t *testing.T, store *inventory.Store, sale inventory.Sale, buyers ...string) []*inventory.Reservation {
	t.Helper()
	var requests []inventory.Request
	for _, b := range buyers {
		requests = append(requests, inventory.Request{Buyer: b, Quantity: 1})
	}
	results, err := store.Claim(ctx, sale.ID, inventory.NewLine("line"), requests)
	if err != nil {
		t.Fatal(err)
	}
	var all []*inventory.Reservation
	for _, r := range results {
		if r.Outcome != inventory.OutcomeHeld {
			t.Fatalf("outcome %v", r.Outcome)
		}
		all = append(all, r.Reservation)
	}
	return all
}

// The whole life of a sale is told, each event once while nothing fails.
func TestEventsOfASale(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(3).In(t, store)
	s := newShop(t)
	publish(t, store, sale, s.URL)
	if _, err := store.Announce(ctx, sale.ID); err != nil {
		t.Fatal(err)
	}
	r := claim(t, store, sale, "a", "b", "c")
	if _, err := testmysql.Release(store, sale.ID, r[1].ID); err != nil {
		t.Fatal(err)
	}
	r = append(r, claim(t, store, sale, "d")...)
	for _, i := range []int{0, 2, 3} {
		if _, err := testmysql.Confirm(store, sale.ID, r[i].ID, fmt.Sprint("pay-", i)); err != nil {
			t.Fatal(err)
		}
	}
	due, err := testmysql.Confirm(store, sale.ID, r[1].ID, "pay-late")
	if err != nil || due.State != inventory.RefundDue {
		t.Fatalf("%+v, %v", due, err)
	}
	for range 2 {
		if _, err := store.Announce(ctx, sale.ID); err != nil {
			t.Fatal(err)
		}
		if err := store.CloseSale(ctx, sale.ID); err != nil {
			t.Fatal(err)
		}
	}
	want := map[string]int{"dev.flashsale.sale.opened": 1, "dev.flashsale.reservation.held": 4, "dev.flashsale.reservation.released": 1,
		"dev.flashsale.reservation.confirmed": 3, "dev.flashsale.reservation.refund_due": 1, "dev.flashsale.sale.sold_out": 1, "dev.flashsale.sale.closed": 1}
	testmysql.Eventually(t, "the outbox is empty", func() bool {
		n, err := store.PendingEvents(ctx, sale.ID)
		return err == nil && n == 0
	})
	if got := s.kinds(); fmt.Sprint(got) != fmt.Sprint(want) || s.asked != len(s.events) {
		t.Errorf("told %v in %d requests, want %v", got, s.asked, want)
	}
	for _, e := range s.events {
		if e.Source != "/flashsales/test/sale" || e.Data.SaleID != sale.ID || e.Time.IsZero() {
			t.Errorf("event %+v", e)
		}
		switch got := e.Data.Reservation; e.Type {
		case "dev.flashsale.reservation.confirmed":
			if got.State != "CONFIRMED" || got.PaymentID == "" || e.Subject != got.ID.String() {
				t.Errorf("event %+v", got)
			}
		case "dev.flashsale.reservation.refund_due":
			if got.ID != r[1].ID || got.PaymentID != "pay-late" || got.Reason != inventory.DueSoldOut || got.Buyer != "b" {
				t.Errorf("event %+v", got)
			}
		}
	}
}

// A webhook that is down delays nothing and loses nothing; several publishers share the work.
func TestAWebhookThatIsDownLosesNothing(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(400).TTL(time.Second).In(t, store)
	s := newShop(t)
	s.setBroken(true)
	publish(t, store, sale, s.URL)
	publish(t, store, sale, s.URL)
	buyers := make([]string, 300)
	for i := range buyers {
		buyers[i] = fmt.Sprint("buyer-", i)
	}
	claim(t, store, sale, buyers...)
	swept := 0
	testmysql.Eventually(t, "the holds are swept while the webhook is down", func() bool {
		n, err := store.Sweep(ctx, sale.ID, "sweeper", 500)
		swept += n
		return err == nil && swept == 300
	})
	testmysql.Eventually(t, "the webhook was asked", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.asked > 1
	})
	if n, err := store.PendingEvents(ctx, sale.ID); err != nil || n != 2 {
		t.Errorf("%d rows wait, %v; want one of 300 holds and one of 300 expiries", n, err)
	}
	s.setBroken(false)
	testmysql.Eventually(t, "all is told once the webhook is back", func() bool {
		n := s.kinds()
		return n["dev.flashsale.reservation.held"] == 300 && n["dev.flashsale.reservation.expired"] == 300
	})
	testmysql.Eventually(t, "the outbox is empty", func() bool {
		n, err := store.PendingEvents(ctx, sale.ID)
		return err == nil && n == 0
	})
}

// An event that is refused for ever holds up no other, and is not lost.
func TestAnEventThatIsRefusedHoldsUpNoOther(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(20).In(t, store)
	s := newShop(t)
	s.refused = `"buyer":"poison"`
	publish(t, store, sale, s.URL)
	claim(t, store, sale, "poison")
	testmysql.Eventually(t, "it was refused", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.asked > 0
	})
	for i := range 10 {
		claim(t, store, sale, fmt.Sprint("buyer-", i))
	}
	testmysql.Eventually(t, "the others are told", func() bool { return s.kinds()["dev.flashsale.reservation.held"] == 10 })
	testmysql.Eventually(t, "the refused one waits alone", func() bool { // a delivery is recorded after the shop has it
		n, err := store.PendingEvents(ctx, sale.ID)
		return err == nil && n == 1
	})
}

func TestBackoff(t *testing.T) {
	for failures, most := range []time.Duration{time.Second, 2 * time.Second, 4 * time.Second, 8 * time.Second, 16 * time.Second, 32 * time.Second, time.Minute, time.Minute} {
		for range 100 {
			if d := backoff(failures); d > most || d < most*4/5 {
				t.Fatalf("after %d failures: %v, want at most %v and at least four fifths of it", failures, d, most)
			}
		}
	}
	if d := backoff(1 << 30); d > time.Minute {
		t.Errorf("after very many: %v", d)
	}
}
