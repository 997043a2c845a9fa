package httpapi

import (
	"net/http"
	"time"

	"flashsale.dev/operator/reserver/admission"
	"flashsale.dev/operator/reserver/inventory"
)

type stockJSON struct {
	SKU        string     `json:"sku"`
	Phase      string     `json:"phase"`
	Units      int64      `json:"units"`
	Available  int64      `json:"available"`
	Held       int64      `json:"held"`
	Sold       int64      `json:"sold"`
	StartsAt   time.Time  `json:"startsAt"`
	OpensIn    float64    `json:"opensIn,omitempty"` // seconds, before the start
	EndsAt     *time.Time `json:"endsAt,omitempty"`
	NextExpiry *time.Time `json:"nextExpiry,omitempty"`
	Now        time.Time  `json:"now"` // by the database's clock
}

// stockOf is the stock as the view tells it at the pod's local instant now.
func stockOf(v *admission.View, now time.Time) stockJSON {
	earliest, _ := v.Bounds(now)
	body := stockJSON{SKU: v.SKU, Phase: phase(v, earliest), Units: v.Units, Available: v.Available, Held: v.Held, Sold: v.Sold,
		StartsAt: v.StartsAt, OpensIn: max(v.StartsAt.Sub(earliest).Seconds(), 0), Now: earliest}
	if !v.EndsAt.IsZero() {
		body.EndsAt = &v.EndsAt
	}
	if !v.NextLapse.IsZero() {
		body.NextExpiry = &v.NextLapse
	}
	return body
}

// phase says what a shopper finds at the instant now of the database's clock.
func phase(v *admission.View, now time.Time) string {
	switch gate := v.Gate(now); {
	case gate == inventory.GateNotOpen:
		return "not-open"
	case gate == inventory.GateClosed:
		return "closed"
	case gate == inventory.GateSuspended:
		return "suspended"
	case v.Available > 0:
		return "open"
	case v.Held > 0:
		return "all-held"
	}
	return "sold-out"
}

// stock answers GET /v1/stock from memory.
func (s *Server) stock(w http.ResponseWriter, _ *http.Request) string {
	v := s.watch.View()
	if v == nil {
		return refuse(w, problemUnavailable)
	}
	body := stockOf(v, time.Now())
	w.Header().Set("Cache-Control", "max-age=1")
	writeJSON(w, http.StatusOK, body)
	return body.Phase
}
