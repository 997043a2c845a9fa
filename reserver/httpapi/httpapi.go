// Package httpapi is the HTTP face of one sale: reservations for shoppers and the checkout, the stock, and the pod's own
// health and metrics.
package httpapi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"

	"flashsale.dev/operator/reserver/admission"
	"flashsale.dev/operator/reserver/inventory"
)

const (
	linePlaces  = 20_000           // payments and releases that may wait for a transaction, each
	answerLimit = 10 * time.Second // longest a shopper waits
	lines       = 2                // claim transactions at once, and confirmations: while one waits for the disk, the next is made
	keysEvery   = 5 * time.Second  // how often the file of keys is looked at
	refundRows  = 8                // tally rows that refunds of a pod spread over, so as not to wait for each other
)

// Config is what a server needs to know beside its sale.
type Config struct {
	Pod         string // unique among the sale's processes
	Identity    admission.Identity
	Limits      admission.Limits
	MaxInFlight int                 // claims that may wait for a transaction
	Challenge   admission.Challenge // nil for none
}

// Server serves one sale. Make it with New, keep Run running, and serve Handler.
type Server struct {
	store    *inventory.Store
	sale     uuid.UUID
	pod      string
	log      *slog.Logger
	identity admission.Identity
	limits   admission.Limits
	test     admission.Challenge
	watch    *admission.Watch
	claims   *admission.Queue[inventory.Request, inventory.Result]
	lookUp   *admission.Queue[inventory.Request, inventory.Result]
	pay      *admission.Queue[inventory.Payment, inventory.Settlement]
	releases *admission.Queue[uuid.UUID, inventory.Settlement]
	feed     feed
	ready    atomic.Pointer[readyRefusals]
	turn     atomic.Uint64
	ending   atomic.Bool

	registry *prometheus.Registry
	answers  *prometheus.CounterVec
	seconds  *prometheus.HistogramVec
	batches  prometheus.Histogram
	lookUps  prometheus.Counter
}

// New makes a server for a sale.
func New(store *inventory.Store, sale uuid.UUID, config Config, registry *prometheus.Registry, log *slog.Logger) *Server {
	pod := config.Pod
	s := &Server{store: store, sale: sale, pod: pod, log: log, identity: config.Identity, limits: config.Limits, test: config.Challenge, registry: registry, feed: feed{ended: make(chan struct{})}}
	s.watch = admission.NewWatch(store, sale, log, func(v *admission.View) {
		s.ready.Store(prepare(v))
		s.tell(v)
	})
	quantity := func(r inventory.Request) int { return r.Quantity }
	var claims []admission.Serve[inventory.Request, inventory.Result]
	var pays []admission.Serve[inventory.Payment, inventory.Settlement]
	for i := range lines {
		line, desk := inventory.NewLine(fmt.Sprintf("%s/claim-%d", pod, i)), fmt.Sprintf("%s/confirm-%d", pod, i)
		claims = append(claims, func(ctx context.Context, batch []inventory.Request) ([]inventory.Result, error) {
			s.batches.Observe(float64(len(batch)))
			results, err := store.Claim(ctx, sale, line, batch)
			if err != nil {
				s.log.Warn("could not claim", "requests", len(batch), "error", err)
			}
			for i, r := range batch {
				if err != nil || results[i].Reservation != nil { // an error may come after the commit
					s.watch.Buyers.Add(r.Buyer)
				}
			}
			return results, err
		})
		pays = append(pays, func(ctx context.Context, batch []inventory.Payment) ([]inventory.Settlement, error) {
			return store.Confirm(ctx, sale, desk, batch)
		})
	}
	s.claims = admission.NewQueue(config.MaxInFlight, quantity, claims...)
	s.pay = admission.NewQueue(linePlaces, func(inventory.Payment) int { return 1 }, pays...) // its units stay where they are
	s.releases = admission.NewQueue(linePlaces, func(uuid.UUID) int { return 1 }, func(ctx context.Context, batch []uuid.UUID) ([]inventory.Settlement, error) {
		return store.Release(ctx, sale, pod+"/release", batch)
	})
	s.lookUp = admission.NewQueue(config.MaxInFlight, quantity, func(ctx context.Context, batch []inventory.Request) ([]inventory.Result, error) {
		s.lookUps.Add(float64(len(batch)))
		return store.LookUp(ctx, sale, s.watch.View().MaxPerBuyer, batch)
	})
	s.register()
	return s
}

func (s *Server) register() {
	s.answers = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "flashsale_answers_total",
		Help: "Answers by call and outcome."}, []string{"call", "outcome"})
	s.seconds = prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "flashsale_answer_seconds",
		Help: "Time to answer, by call.", Buckets: prometheus.ExponentialBuckets(0.0005, 2, 15)}, []string{"call"})
	s.batches = prometheus.NewHistogram(prometheus.HistogramOpts{Name: "flashsale_claim_batch_requests",
		Help: "Requests that shared a transaction.", Buckets: prometheus.ExponentialBuckets(1, 2, 10)})
	s.lookUps = prometheus.NewCounter(prometheus.CounterOpts{Name: "flashsale_look_ups_total",
		Help: "Requests that memory could not refuse, because their buyer may have a reservation, though it knew that there is nothing."})
	units := func(state string, get func(*admission.View) int64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "flashsale_units", Help: "Units of the sale by state, as this pod sees them.",
			ConstLabels: prometheus.Labels{"state": state}}, func() float64 {
			if v := s.watch.View(); v != nil {
				return float64(get(v))
			}
			return 0
		})
	}
	s.registry.MustRegister(s.answers, s.seconds, s.batches, s.lookUps,
		units("available", func(v *admission.View) int64 { return v.Available }),
		units("held", func(v *admission.View) int64 { return v.Held }),
		units("sold", func(v *admission.View) int64 { return v.Sold }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "flashsale_line_waiting", Help: "Requests that wait for a claim transaction."},
			func() float64 { return float64(s.claims.Waiting()) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "flashsale_listeners", Help: "Streams of events that are open."},
			func() float64 { return float64(s.feed.listeners.Load()) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "flashsale_clock_skew_seconds", Help: "By how much the pod's clock is ahead of the database's. Nothing depends on it."},
			func() float64 {
				if v := s.watch.View(); v != nil {
					return v.Arrived.Round(0).Sub(v.Now).Seconds() // without the monotonic clock, which cannot be wrong
				}
				return 0
			}),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "flashsale_view_age_seconds", Help: "Age of what the pod knows of its sale."},
			func() float64 {
				if v := s.watch.View(); v != nil {
					return time.Since(v.Arrived).Seconds()
				}
				return -1
			}))
}

// Run serves the lines and keeps the view of the sale until the context ends. End it after the HTTP server: requests in
// flight are answered by it.
func (s *Server) Run(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go s.claims.Run(ctx)
	go s.pay.Run(ctx)
	go s.releases.Run(ctx)
	go s.lookUp.Run(ctx)
	go s.identity.Keys.Follow(ctx, keysEvery, s.log)
	s.watch.Run(ctx, func(ctx context.Context) {
		n, err := s.store.Sweep(ctx, s.sale, s.pod, 500)
		if err == nil && n > 0 {
			s.log.Warn("swept holds because no sweeper did", "holds", n)
		}
	})
}

// Ready says whether the pod should get requests: it knows its sale, and is not shutting down.
func (s *Server) Ready() error {
	v := s.watch.View()
	switch {
	case s.ending.Load():
		return errors.New("shutting down")
	case v == nil:
		return errors.New("the sale has not been read yet")
	case v.LoadedAt.IsZero():
		return errors.New("the sale's units are still loading")
	}
	// A database that went away later does not make pods unready: with no pod ready, shoppers would get connection
	// errors from the Service instead of typed answers.
	return nil
}

// BeginShutdown makes the pod unready; it still answers, and ends each connection after its next answer, and the streams of
// events at once: their clients connect again, to another pod.
func (s *Server) BeginShutdown() {
	if !s.ending.Swap(true) {
		close(s.feed.ended)
	}
}

// call answers one request, and names the outcome for the metrics.
type call func(w http.ResponseWriter, r *http.Request) (outcome string)

// callMetrics are those of one call. The vectors take a lock for each look-up, which all cores would share.
type callMetrics struct {
	name    string
	answers *prometheus.CounterVec
	known   sync.Map // of counters, by outcome
	seconds prometheus.Observer
}

func (s *Server) metricsOf(name string) *callMetrics {
	return &callMetrics{name: name, answers: s.answers, seconds: s.seconds.WithLabelValues(name)}
}

func (m *callMetrics) count(outcome string, began time.Time) {
	c, ok := m.known.Load(outcome)
	if !ok {
		c, _ = m.known.LoadOrStore(outcome, m.answers.WithLabelValues(m.name, outcome))
	}
	c.(prometheus.Counter).Inc()
	m.seconds.Observe(time.Since(began).Seconds())
}

// Handler serves the API.
func (s *Server) Handler() http.Handler {
	mux := http.NewServeMux()
	route := func(path string, methods map[string]call) {
		seen := make(map[string]*callMetrics, len(methods))
		for m := range methods {
			seen[m] = s.metricsOf(m + " " + path)
		}
		allow := strings.Join(slices.Sorted(maps.Keys(methods)), ", ")
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			c, ok := methods[r.Method]
			if !ok {
				w.Header().Set("Allow", allow)
				refuse(w, &Problem{Slug: "method-not-allowed", Title: "No such method here", Status: http.StatusMethodNotAllowed, Detail: "Allowed: " + allow})
				return
			}
			began := time.Now()
			seen[r.Method].count(c(w, r), began)
		})
	}
	reserve := map[string]call{http.MethodPost: s.admit(s.reserve)}
	stock := map[string]call{http.MethodGet: s.stock, http.MethodHead: s.stock}
	route("/v1/reservations", reserve)
	route("/reserve", reserve)
	route("/v1/reservations/{id}", map[string]call{http.MethodGet: s.admit(s.status), http.MethodDelete: s.admit(s.release)})
	route("/v1/reservations/{id}/confirm", map[string]call{http.MethodPost: s.admit(checkoutOnly(s.confirm))})
	route("/v1/reservations/{id}/refund", map[string]call{http.MethodPost: s.admit(checkoutOnly(s.refund))})
	route("/v1/stock", stock)
	route("/stock", stock)
	route("/v1/events", map[string]call{http.MethodGet: s.events})
	route("/v1/challenge", map[string]call{http.MethodGet: s.admit(s.challenge)})
	route("/.well-known/jwks.json", map[string]call{http.MethodGet: s.jwks, http.MethodHead: s.jwks})
	route("/problems/{slug}", map[string]call{http.MethodGet: s.problemPage, http.MethodHead: s.problemPage})
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) { refuse(w, problemNotFound) })
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if s.ending.Load() {
			// Clients come back over a new connection, which leads to another pod. A connection that is closed while it idles
			// could be closed under a request.
			w.Header().Set("Connection", "close")
		}
		mux.ServeHTTP(w, r)
	})
}

func refuse(w http.ResponseWriter, p *Problem) string { return p.ready().write(w) }

// fail answers an error that no call expects: the database, mostly.
func (s *Server) fail(w http.ResponseWriter, r *http.Request, doing string, err error) string {
	// A flood must not flood the log: the counters tell of it.
	if !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, admission.ErrFull) {
		s.log.Warn("could not "+doing, "error", err, "method", r.Method)
	}
	return refuse(w, problemUnavailable)
}

// admittedCall answers a request whose caller was looked at.
type admittedCall func(w http.ResponseWriter, r *http.Request, c *admission.Caller) (outcome string)

// admit finds out who calls, and whether he calls too often.
func (s *Server) admit(f admittedCall) call {
	foreign := http.NewCrossOriginProtection()
	return func(w http.ResponseWriter, r *http.Request) string {
		c, err := s.identity.Identify(r)
		if allowance := s.limits.Take(&c, time.Now()); !allowance.OK || allowance.Scarce() {
			h := w.Header()
			h["Ratelimit-Policy"], h["Ratelimit"] = allowance.Headers()
			if !allowance.OK {
				return refuse(w, &Problem{Slug: "rate-limited", Title: "Too many requests", Status: http.StatusTooManyRequests, RetryAfter: allowance.RetryAfter()})
			}
		}
		switch {
		case err != nil:
			return unauthenticated(w, problemCredential)
		case c.Ambient && foreign.Check(r) != nil:
			return refuse(w, problemCrossOrigin)
		}
		return f(w, r, &c)
	}
}

// checkoutOnly refuses all but the checkout.
func checkoutOnly(f admittedCall) admittedCall {
	return func(w http.ResponseWriter, r *http.Request, c *admission.Caller) string {
		switch {
		case c.Checkout:
			return f(w, r, c)
		case c.Buyer == "":
			return unauthenticated(w, problemUnauthenticated)
		}
		return refuse(w, problemCheckoutOnly)
	}
}

func unauthenticated(w http.ResponseWriter, p *Problem) string {
	w.Header().Set("WWW-Authenticate", "Bearer")
	return refuse(w, p)
}

type reservationJSON struct {
	ID        uuid.UUID `json:"id"`
	State     string    `json:"state"`
	Quantity  int       `json:"quantity"`
	GrantedAt time.Time `json:"grantedAt,omitzero"` // not of a refund due for a reservation that never was
	ExpiresAt time.Time `json:"expiresAt,omitzero"`
	PaymentID string    `json:"paymentId,omitempty"`
	Reason    string    `json:"reason,omitempty"`    // of a refund due
	Restocked *bool     `json:"restocked,omitempty"` // of a refunded one
	Token     string    `json:"token,omitempty"`     // of a live hold
}

func (s *Server) writeReservation(w http.ResponseWriter, status int, r *inventory.Reservation) string {
	body := reservationJSON{ID: r.ID, State: r.State.String(), Quantity: r.Quantity, GrantedAt: r.GrantedAt, ExpiresAt: r.ExpiresAt,
		PaymentID: r.PaymentID, Reason: r.Reason}
	if restocked := r.State == inventory.Refunded; restocked || r.State == inventory.RefundedKept {
		body.Restocked = &restocked
	}
	if v := s.watch.View(); r.State == inventory.Held && v != nil {
		body.Token = sign(&s.identity.Keys.Ring().Keys[0], s.sale, v.SKU, r)
	}
	writeJSON(w, status, body)
	return strings.ToLower(r.State.String())
}

// owned reads the reservation's id in the path, and hides the reservation from a buyer who does not own it.
func (s *Server) owned(ctx context.Context, r *http.Request, c *admission.Caller) (uuid.UUID, *Problem, error) {
	rid, p := reservationID(r)
	if p != nil || c.Checkout {
		return rid, p, nil
	}
	res, err := s.store.Reservation(ctx, s.sale, rid)
	if errors.Is(err, inventory.ErrNotFound) || err == nil && res.Buyer != c.Buyer {
		return rid, problemUnknown, nil
	}
	return rid, nil, err
}

// change runs a call on the reservation of the path, and answers its state or why not.
func (s *Server) change(w http.ResponseWriter, r *http.Request, c *admission.Caller, doing string, f func(ctx context.Context, rid uuid.UUID) (*inventory.Reservation, error)) string {
	if !c.Checkout && c.Buyer == "" {
		return unauthenticated(w, problemUnauthenticated)
	}
	ctx, cancel := context.WithTimeout(r.Context(), answerLimit)
	defer cancel()
	rid, p, err := s.owned(ctx, r, c)
	if p != nil {
		return refuse(w, p)
	}
	if err != nil {
		return s.fail(w, r, doing, err)
	}
	res, err := f(ctx, rid)
	conflict := func(slug, title string) string {
		return refuse(w, &Problem{Slug: slug, Title: title, Status: http.StatusConflict})
	}
	switch {
	case err == nil:
		return s.writeReservation(w, http.StatusOK, res)
	case errors.Is(err, inventory.ErrNotFound):
		return refuse(w, problemUnknown)
	case errors.Is(err, inventory.ErrNotConfirmed):
		return conflict("not-confirmed", "The reservation is not confirmed")
	case errors.Is(err, inventory.ErrConfirmed):
		return conflict("confirmed", "The reservation is confirmed")
	case errors.Is(err, inventory.ErrPaymentMismatch):
		return conflict("payment-mismatch", "The reservation was confirmed with another payment")
	case errors.Is(err, inventory.ErrPaymentReused):
		return conflict("payment-reused", "The payment was used for another reservation")
	}
	return s.fail(w, r, doing, err)
}

// status answers GET /v1/reservations/{id}.
func (s *Server) status(w http.ResponseWriter, r *http.Request, c *admission.Caller) string {
	return s.change(w, r, c, "read a reservation", func(ctx context.Context, rid uuid.UUID) (*inventory.Reservation, error) {
		return s.store.Reservation(ctx, s.sale, rid)
	})
}

// release answers DELETE /v1/reservations/{id}.
func (s *Server) release(w http.ResponseWriter, r *http.Request, c *admission.Caller) string {
	return s.change(w, r, c, "release a reservation", func(ctx context.Context, rid uuid.UUID) (*inventory.Reservation, error) {
		defer s.watch.Nudge()
		return settled(s.releases.Ask(ctx, rid))
	})
}

// confirm answers POST /v1/reservations/{id}/confirm.
func (s *Server) confirm(w http.ResponseWriter, r *http.Request, c *admission.Caller) string {
	var body confirmBody
	if p := decode(w, r, &body); p != nil {
		return refuse(w, p)
	}
	paidAt, p := body.check()
	if p != nil {
		return refuse(w, p)
	}
	return s.change(w, r, c, "confirm a reservation", func(ctx context.Context, rid uuid.UUID) (*inventory.Reservation, error) {
		return settled(s.pay.Ask(ctx, inventory.Payment{Reservation: rid, ID: body.PaymentID, PaidAt: paidAt}))
	})
}

func settled(answer inventory.Settlement, err error) (*inventory.Reservation, error) {
	if err != nil {
		return nil, err
	}
	return answer.Reservation, answer.Err
}

// refund answers POST /v1/reservations/{id}/refund.
func (s *Server) refund(w http.ResponseWriter, r *http.Request, c *admission.Caller) string {
	body := refundBody{Restock: true}
	if p := decode(w, r, &body); p != nil {
		return refuse(w, p)
	}
	return s.change(w, r, c, "refund a reservation", func(ctx context.Context, rid uuid.UUID) (*inventory.Reservation, error) {
		defer s.watch.Nudge()
		return s.store.Refund(ctx, s.sale, rid, s.tallyRow(), body.Restock)
	})
}

func (s *Server) tallyRow() string {
	return fmt.Sprintf("%s/%d", s.pod, s.turn.Add(1)%refundRows)
}
