package httpapi

import (
	"embed"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"strconv"
	"time"
)

// problemBase is where the types of problems are documented; the last part of the type is its slug.
const problemBase = "https://flashsale.dev/problems/"

// problemPages explain the problems, a file for each slug.
//
//go:embed problems/*.md
var problemPages embed.FS

// problemPage answers GET /problems/{slug}, so that whoever has a pod has the page of its version.
func (s *Server) problemPage(w http.ResponseWriter, r *http.Request) string {
	page, err := problemPages.ReadFile("problems/" + r.PathValue("slug") + ".md")
	if err != nil {
		return refuse(w, problemNotFound)
	}
	h := w.Header()
	h.Set("Content-Type", "text/markdown; charset=utf-8")
	h.Set("Cache-Control", "max-age=3600")
	_, _ = w.Write(page) // the client may be gone; nothing is lost by that
	return "page"
}

// Problem is an RFC 9457 problem detail. Every refusal of the API is one.
type Problem struct {
	Slug       string // last part of the type
	Title      string
	Status     int
	Detail     string
	RetryAfter time.Duration  // sent as Retry-After in whole seconds, rounded up; zero sends none
	Extra      map[string]any // extension members
}

// ready gives the answer as it is sent.
func (p *Problem) ready() *readyAnswer {
	body := map[string]any{"type": problemBase + p.Slug, "title": p.Title, "status": p.Status}
	if p.Detail != "" {
		body["detail"] = p.Detail
	}
	maps.Copy(body, p.Extra)
	text := encode(body)
	a := &readyAnswer{outcome: p.Slug, status: p.Status, body: text, length: []string{strconv.Itoa(len(text))}}
	if p.RetryAfter > 0 {
		a.retryAfter = []string{strconv.FormatInt(int64((p.RetryAfter+time.Second-1)/time.Second), 10)}
	}
	return a
}

// readyAnswer is a problem as it is sent, any number of times. Header values are slices that all answers share.
type readyAnswer struct {
	outcome            string
	status             int
	body               []byte
	length, retryAfter []string
}

var (
	contentTypeProblem = []string{"application/problem+json"}
	noStore            = []string{"no-store"}
)

func (a *readyAnswer) write(w http.ResponseWriter) (outcome string) {
	h := w.Header()
	h["Content-Type"], h["Cache-Control"], h["Content-Length"] = contentTypeProblem, noStore, a.length
	if a.retryAfter != nil {
		h["Retry-After"] = a.retryAfter
	}
	w.WriteHeader(a.status)
	_, _ = w.Write(a.body) // the client may be gone; nothing is lost by that
	return a.outcome
}

func encode(body any) []byte {
	b, err := json.Marshal(body)
	if err != nil { // bodies are maps and structs of plain values
		panic(fmt.Sprintf("encoding an answer: %v", err))
	}
	return append(b, '\n')
}

func writeJSON(w http.ResponseWriter, status int, body any) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	if h.Get("Cache-Control") == "" {
		h.Set("Cache-Control", "no-store")
	}
	w.WriteHeader(status)
	_, _ = w.Write(encode(body)) // the client may be gone; nothing is lost by that
}

// The problems that say nothing about the sale.
var (
	problemUnauthenticated = &Problem{Slug: "unauthenticated", Title: "Nobody is signed in", Status: http.StatusUnauthorized,
		Detail: "The request says nothing of who makes it that could be believed."}
	problemCredential = &Problem{Slug: "unauthenticated", Title: "The credential is not accepted", Status: http.StatusUnauthorized,
		Detail: "The token, or the header that names the buyer, is not what it should be, or no more."}
	problemCheckoutOnly = &Problem{Slug: "checkout-only", Title: "This call is the checkout's", Status: http.StatusForbidden,
		Detail: "Buyers cannot confirm or refund."}
	problemCrossOrigin = &Problem{Slug: "cross-origin", Title: "Another site made the browser send this", Status: http.StatusForbidden}
	problemChallenge   = &Problem{Slug: "challenge-required", Title: "A challenge must be solved first", Status: http.StatusForbidden,
		Detail: "Solve the challenge of GET /v1/challenge, or of the shop's page, and send the solution in the header Challenge-Solution."}
	problemListeners = &Problem{Slug: "busy", Title: "Try again", Status: http.StatusServiceUnavailable, RetryAfter: 5 * time.Second,
		Detail: "The pod streams events to as many as it can. GET /v1/stock tells the same."}
	problemTooLarge    = &Problem{Slug: "too-large", Title: "The body is larger than 64 KiB", Status: http.StatusRequestEntityTooLarge}
	problemNotFound    = &Problem{Slug: "not-found", Title: "No such resource", Status: http.StatusNotFound}
	problemUnknown     = &Problem{Slug: "reservation-not-found", Title: "No such reservation", Status: http.StatusNotFound}
	problemUnavailable = &Problem{Slug: "busy", Title: "Try again", Status: http.StatusServiceUnavailable, RetryAfter: time.Second,
		Detail: "The answer could not be found out in time. Asking again is safe: it gives the same reservation if there is one."}
)

func problemInvalid(detail string) *Problem {
	return &Problem{Slug: "invalid", Title: "The request is not valid", Status: http.StatusUnprocessableEntity, Detail: detail}
}
